"""Parallel: models whose layers lie on several workers, and what crosses the boundaries between them, compressed.

pipeline_boundary  boundary: the codec of what crosses between two pipeline stages, and which codecs may
compressed_stage   CompressedStage: a stage's module that decodes, computes and encodes, in both passes
carrier            messages as the bits of float32 tensors, which torch's pipelining sends both ways
sample_memory      what both sides know of each sample's activations, to which differences are sent (AQ-SGD)

remote             remote: a layer on another rank, called as if it were here; autograd goes through it
remote_run         the hub of this worker, opened with its first remote module
remote_hub         one endpoint of each rank: sends calls, and serves a call once that is delivered twice
remote_service     the owner's side: held graphs, gradients of each client, and the optimizer
remote_messages    requests and answers as checked JSON beside tensors
remote_codec       tensors of a call as payloads, compressed
"""

from gossamer.train.parallel.compressed_stage import CompressedStage
from gossamer.train.parallel.pipeline_boundary import Boundary, boundary
from gossamer.train.parallel.remote import RemoteModule, RemoteOptimizer, remote

__all__ = ["Boundary", "CompressedStage", "RemoteModule", "RemoteOptimizer", "boundary", "remote"]
