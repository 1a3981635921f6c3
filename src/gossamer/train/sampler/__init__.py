"""Sampler: each worker's own part of a dataset, disjoint, covering, resumable, and dealt out again when workers change.

shard     Shard, the sampler itself
progress  what loaders, checkpoints and changes of the workers ask of a shard
stream    StreamShard, for iterable datasets; hub_stream: for those of Hugging Face, which have shards of their own
epoch_marks  what is drawn outside of session.epoch() does not count
position  where a worker stands: its epoch and its draws; positions of all of them after workers came or went
deal      how one epoch's common order is shared out, again after each change of the workers
non_iid   parts in which few labels are frequent
sources   what is dealt out: its length and its labels
"""

from gossamer.train.sampler.deal import Even
from gossamer.train.sampler.epoch_marks import EpochMarks
from gossamer.train.sampler.hub_stream import HubStreamShard, is_hub_stream
from gossamer.train.sampler.non_iid import dirichlet_split
from gossamer.train.sampler.position import taken_up
from gossamer.train.sampler.progress import WorldShard
from gossamer.train.sampler.shard import Shard
from gossamer.train.sampler.sources import Labels
from gossamer.train.sampler.stream import StreamShard

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
