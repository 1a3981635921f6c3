"""Sampler: each worker's own part of a dataset, disjoint, covering, resumable, and dealt out again when workers change.

shard     Shard, the sampler itself, and what a loader tells it
position  where a worker stands: its epoch and its draws; positions of all of them after workers came or went
deal      how one epoch's common order is shared out, again after each change of the workers
non_iid   parts in which few labels are frequent
sources   what is dealt out: its length and its labels
"""

from gossamer.sampler.non_iid import dirichlet_split
from gossamer.sampler.position import taken_up
from gossamer.sampler.shard import Shard
from gossamer.sampler.sources import Labels

__all__ = ["Labels", "Shard", "dirichlet_split", "taken_up"]
