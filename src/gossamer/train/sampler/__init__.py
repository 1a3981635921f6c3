"""Sampler: each worker's part of a dataset: disjoint, covering, resumable, and divided again when workers change.

shard     Shard, the sampler itself
progress  positions of a shard for loaders, checkpoints and changes of the workers; excludes draws outside of epoch()
stream    StreamShard, for iterable datasets; HubStreamShard, for those of Hugging Face, which have their own shards
position  a worker's epoch and draws; positions of all workers after a change
deal      division of one epoch's common order, repeated after each change of the workers
non_iid   parts with few frequent labels
sources   length and labels of a dataset
"""

from gossamer.train.sampler.deal import Even
from gossamer.train.sampler.non_iid import dirichlet_split
from gossamer.train.sampler.position import taken_up
from gossamer.train.sampler.progress import EpochMarks, WorldShard
from gossamer.train.sampler.shard import Shard
from gossamer.train.sampler.sources import Labels
from gossamer.train.sampler.stream import HubStreamShard, StreamShard, is_hub_stream

__all__ = [
    "EpochMarks",
    "Even",
    "HubStreamShard",
    "Labels",
    "Shard",
    "StreamShard",
    "WorldShard",
    "dirichlet_split",
    "is_hub_stream",
    "taken_up",
]
