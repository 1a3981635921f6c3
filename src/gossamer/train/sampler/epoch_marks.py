"""Epoch marks: exclude draws from shards outside of session.epoch() that were not trained on.

A rank that looks at a batch, or measures the accuracy on training data, draws from its shard while the others do not.
Its next epoch would otherwise have another number, and another shuffle, than theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from gossamer.train.sampler.progress import WorldShard


class EpochMarks:
    """Positions of shards at the end of the last session.epoch() block, or at the beginning of the first one."""

    def __init__(self) -> None:
        self._marks: weakref.WeakKeyDictionary[WorldShard, Any] = weakref.WeakKeyDictionary()
        self._begins: weakref.WeakKeyDictionary[WorldShard, Any] = weakref.WeakKeyDictionary()  # marks before moves
        self._progress: list[Callable[[], object]] = []  # by session: the value changes with each training step
        self._within, self._used = False, False  # whether session.epoch() is active, and whether it ever was
        self._marked_at = self._now()

    def _now(self) -> list[object]:
        return [progress() for progress in self._progress]

    @property
    def aside(self) -> bool:
        """Whether draws since the marks count for no epoch: outside of session.epoch(), without a step since then."""
        return bool(self._progress) and not self._within and self._marked_at == self._now()

    def watch(self, progress: Callable[[], object]) -> None:
        """Register an attached session. progress: returns a value that changes with each of its steps."""
        unmoved = self._marked_at == self._now()
        self._progress.append(progress)
        if unmoved:
            self._marked_at = self._now()

    def add(self, shard: WorldShard) -> None:
        """Register a new shard, with its beginning as the mark."""
        self._marks[shard] = self._begins[shard] = shard.mark()

    def set(self, shards: Iterable[WorldShard], *, moved: bool = False) -> None:
        """Set the marks. From here, draws count only if they are trained on or within session.epoch().

        Args:
            moved: whether it was a change of the workers that has modified the positions, and not draws.
        """
        for shard in shards:
            self._marks[shard] = shard.mark()
            if not moved:
                self._begins[shard] = self._marks[shard]
        self._marked_at = self._now()

    def rewind(self, shards: Iterable[WorldShard]) -> None:
        """Undo draws that do not count."""
        if self.aside:
            for shard in shards:
                shard.rewind(self._marks[shard])

    def enter(self, shards: Iterable[WorldShard]) -> None:
        """Called when session.epoch() begins."""
        self.rewind(shards)
        self._within = True

    def leave(self, shards: Iterable[WorldShard]) -> None:
        """Called when session.epoch() ends."""
        self._within, self._used = False, True
        self.set(shards)

    def drawn(self, shard: WorldShard) -> bool:
        """Whether entries of the shard were drawn in this session.epoch() block; without such a block, ever."""
        return shard.state_at(self._begins[shard]) != shard.state_dict()

    def states(self, shards: Iterable[WorldShard]) -> list[dict[str, Any]]:
        """Positions for a checkpoint, without draws that do not count. Without session.epoch() all draws count."""
        if not self._used or not self.aside:
            return [shard.state_dict() for shard in shards]
        return [shard.state_at(self._marks[shard]) for shard in shards]
