"""Parallel: models with layers on several workers, and compression of tensors at the boundaries between them.

pipeline_boundary  boundary: the codec between two pipeline stages, and checks of codecs
compressed_stage   CompressedStage: a stage's module that decodes, computes and encodes, in both passes; SampleMemory:
                   activations as known to both sides, to which differences are sent (AQ-SGD)
carrier            messages as the bits of float32 tensors, which torch's pipelining sends in both directions

remote             remote: a layer on another rank, called like a local one, with autograd
remote_hub         one endpoint per rank: sends calls, and serves each call once, even if it is delivered twice
remote_service     the owner's side: held graphs, gradients of each client, and the optimizer
remote_messages    requests and answers as checked JSON, separate from tensors
remote_codec       tensors of a call as payloads, compressed
"""

from gossamer.train.parallel.compressed_stage import CompressedStage
from gossamer.train.parallel.pipeline_boundary import Boundary, boundary
from gossamer.train.parallel.remote import RemoteModule, RemoteOptimizer, remote

__all__ = ["Boundary", "CompressedStage", "RemoteModule", "RemoteOptimizer", "boundary", "remote"]
