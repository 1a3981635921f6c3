"""Parallel: models whose layers lie on several workers, and what crosses the boundaries between them, compressed.

remote             remote: a layer on another rank, called as if it were here; autograd goes through it
remote_run         the hub of this worker, opened with its first remote module
remote_hub         one endpoint of each rank: sends calls, and serves a call once that is delivered twice
remote_service     the owner's side: held graphs, gradients of each client, and the optimizer
remote_messages    requests and answers as checked JSON beside tensors
remote_codec       tensors of a call as payloads, compressed
"""

from gossamer.parallel.remote import RemoteModule, RemoteOptimizer, remote

__all__ = ["RemoteModule", "RemoteOptimizer", "remote"]
