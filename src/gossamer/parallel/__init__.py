"""Parallel: models whose layers or tensors lie on several workers, and what crosses between them, compressed.

replica_mesh       the ranks that hold the same part of the model, from one dimension of a DeviceMesh
local_shards       this rank's part of each DTensor, as a parameter that the synchronizers average
local_state        state dicts of local shards, for checkpoints
model_group        the ranks that hold one replica together: one norm, one decision to skip a step
pipeline_boundary  boundary: the codec of what crosses between two pipeline stages, and which codecs may
compressed_stage   CompressedStage: a stage's module that decodes, computes and encodes, in both passes
carrier            messages as the bits of float32 tensors, which torch's pipelining sends both ways
sample_memory      what both sides know of each sample's activations, to which differences are sent (AQ-SGD)
"""

from gossamer.parallel.compressed_stage import CompressedStage
from gossamer.parallel.pipeline_boundary import Boundary, boundary

__all__ = ["Boundary", "CompressedStage", "boundary"]
