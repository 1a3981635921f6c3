"""World: this worker's rank among all workers, and its shards of the data."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gossamer import environment, events
from gossamer.errors import CheckpointError
from gossamer.sampler import Labels, Shard


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """This worker's place among all workers; alone, a world of one."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    _shards: list[weakref.ref[Shard]] = field(default_factory=list, repr=False)
    _told: list[bool] = field(default_factory=list, repr=False)  # of a loader that draws ahead, once

    @property
    def is_first(self) -> bool:
        """True on rank 0 only: the worker that prints and writes."""
        return self.rank == 0

    def shard(
        self,
        dataset: object,
        stratify: Labels | None = None,
        seed: int = 0,
        *,
        labels: Labels | None = None,
        non_iid: float | None = None,
    ) -> Shard:
        """This rank's part of `dataset` (map-style, or a sampler), as a sampler for a DataLoader.

        stratify: one label a sample, equally frequent on all ranks. non_iid, with `labels`: unequally frequent, by a
        Dirichlet distribution of this concentration: 100 is nearly equal, 0.1 leaves most ranks few labels.
        """
        shard = Shard(
            dataset, rank=self.rank, size=self.size, stratify=stratify, seed=seed, labels=labels, non_iid=non_iid
        )
        self._shards.append(weakref.ref(shard))
        return shard

    def _alive(self) -> list[Shard]:
        # Weak references, so that shards made for one evaluation and dropped do not count.
        return [shard for reference in self._shards if (shard := reference()) is not None]

    def state_dict(self) -> dict[str, Any]:
        """The positions of the shards in use, in the order they were made."""
        shards = self._alive()
        if self.is_first and not self._told and any(shard.drawn_ahead and not shard.tracked for shard in shards):
            self._told.append(True)
            events.notice(
                "a DataLoader with workers fetches ahead, and a checkpoint counts as trained on what was only fetched: "
                "the resumed run would skip it. Let the session count what the loop takes: "
                "loader = session.track(DataLoader(...))"
            )
        return {"shards": [shard.state_dict() for shard in shards]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the shards in use go on where the saved ones stood."""
        saved, shards = state["shards"], self._alive()
        if len(saved) != len(shards):
            raise CheckpointError(
                f"The checkpoint holds the positions of {len(saved)} shards and this run has {len(shards)}, "
                "so they cannot be matched. Make the same calls of world.shard, in the same order, before "
                "loading."
            )
        for shard, position in zip(shards, saved, strict=True):
            shard.load_state_dict(position)


_world: World | None = None


def init() -> World:
    """Join the job that the environment describes; alone, a world of one. Later calls return the same."""
    global _world
    if _world is None:
        job = environment.here()
        if job.world > 1:
            environment.join(job)
        device = environment.device_for(job)
        _world = World(rank=job.rank, size=job.world, local_rank=job.local_rank, device=device)
    return _world


def current() -> World:
    """This process's World; joins first where `init` was not called."""
    return init()
