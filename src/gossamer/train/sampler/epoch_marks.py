"""Epoch marks: keep what is drawn from shards outside of session.epoch(), and not trained on, from counting.

A rank that looks at a batch, or measures its accuracy on the training data, draws from its shard while the others do
not. The next epoch of this rank would then have another number, and another shuffle, than theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from gossamer.train.sampler.progress import WorldShard


class EpochMarks:
    """Positions of shards at the end of the last session.epoch() block, or from which the first one begins."""

    def __init__(self) -> None:
        self._marks: weakref.WeakKeyDictionary[WorldShard, Any] = weakref.WeakKeyDictionary()
        self._progress: list[Callable[[], object]] = []  # of each session: another value after each training step
        self._within, self._used = False, False  # session.epoch(): now, and ever
        self._marked_at = self._now()

    def _now(self) -> list[object]:
        return [progress() for progress in self._progress]

    @property
    def aside(self) -> bool:
        """Whether draws since the marks belong to no epoch: outside of session.epoch(), and no step was made since."""
        return bool(self._progress) and not self._within and self._marked_at == self._now()

    def watch(self, progress: Callable[[], object]) -> None:
        """A session is attached. progress: returns another value after each of its steps."""
        unmoved = self._marked_at == self._now()
        self._progress.append(progress)
        if unmoved:
            self._marked_at = self._now()

    def add(self, shard: WorldShard) -> None:
        """A shard was made: its mark is its beginning."""
        self._marks[shard] = shard.mark()

    def set(self, shards: Iterable[WorldShard]) -> None:
        """From here on only what is trained on, or drawn within session.epoch(), counts."""
        for shard in shards:
            self.add(shard)
        self._marked_at = self._now()

    def rewind(self, shards: Iterable[WorldShard]) -> None:
        """Take back what was drawn aside."""
        if self.aside:
            for shard in shards:
                shard.rewind(self._marks[shard])

    def enter(self, shards: Iterable[WorldShard]) -> None:
        """session.epoch() begins."""
        self.rewind(shards)
        self._within = True

    def leave(self, shards: Iterable[WorldShard]) -> None:
        """session.epoch() ends."""
        self._within, self._used = False, True
        self.set(shards)

    def states(self, shards: Iterable[WorldShard]) -> list[dict[str, Any]]:
        """The positions for a checkpoint, without what was drawn aside. Without session.epoch() all counts."""
        if not self._used or not self.aside:
            return [shard.state_dict() for shard in shards]
        return [shard.state_at(self._marks[shard]) for shard in shards]
