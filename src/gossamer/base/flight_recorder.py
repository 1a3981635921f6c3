"""Flight recorder: the latest collective operations of this process, in a ring, and what it waits for now.

Threads that communicate write, one reference at a time; whoever looks, from any thread, sees a moment of it. Nothing of
it is sent, and no tensor is kept.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from gossamer.base.spans.record_format import code_of, operation_text

MOST_OPERATIONS = 200


class RankedGroup(Protocol):
    """A transport, as far as its operations are counted."""

    rank: int
    world: int


class NotedOperation:
    """One operation. Moments are seconds of time.perf_counter(); answered is 0 until it was.

    group: this rank's in the group, and the group's size; number: among the group's operations, from 0, the same on
    every rank; kinds: of operations in it (Operation.names), or what it is
    called; bucket: its place in the step, from 1, 0: none.
    """

    __slots__ = ("answered", "began", "bucket", "group", "kinds", "nbytes", "number", "step", "waits_for")

    def __init__(
        self,
        group: tuple[int, int],
        number: int,
        kinds: Collection[str] | str,
        nbytes: float,
        step: int,
        bucket: int,
        began: float,
    ) -> None:
        self.group, self.number, self.kinds, self.nbytes = group, number, kinds, nbytes
        self.step, self.bucket, self.began, self.answered = step, bucket, began, 0.0
        self.waits_for: tuple[int, ...] = ()  # ranks of the group whose part is next, once it has taken long

    @property
    def name(self) -> str:
        return self.kinds if isinstance(self.kinds, str) else operation_text(code_of(set(self.kinds)))


# In the place of an operation, where there is none; what is written to it nobody reads
NOTHING = NotedOperation((0, 1), -1, "nothing", 0.0, 0, 0, 0.0)


class FlightRecorder:
    """The operations of one process. `waiting` is the one whose answer a thread waits for, NOTHING while none does."""

    def __init__(self, room: int = MOST_OPERATIONS) -> None:
        self._ring: deque[NotedOperation] = deque(maxlen=room)
        self._counts: dict[tuple[int, int], Iterator[int]] = {}
        self.waiting = NOTHING
        self.begun = 0  # operations, ever
        self.step = 0  # that the operations which begin now belong to
        self.buckets = 0  # of a step; 0: not known
        self.saving = False

    def begin(
        self, group: RankedGroup, kinds: Collection[str] | str, nbytes: float, began: float, bucket: int = 0
    ) -> NotedOperation:
        """An operation begins. All ranks of a group begin the same ones in the same order, so counting is enough."""
        key = group.rank, group.world
        told: int | None = getattr(group, "operation_number", None)
        if told is None:
            numbers = self._counts.get(key)
            told = next(numbers if numbers is not None else self._counts.setdefault(key, itertools.count()))
        noted = NotedOperation(key, told, kinds, nbytes, self.step, bucket, began)
        self._ring.append(noted)
        self.begun += 1
        return noted

    @contextmanager
    def call(self, group: RankedGroup, name: str) -> Iterator[None]:
        """Within the block this thread is in a call of all ranks, which answers at once."""
        noted = self.begin(group, name, 0.0, time.perf_counter())
        self.waiting = noted
        yield
        self.waiting, noted.answered = NOTHING, time.perf_counter()

    @contextmanager
    def save(self) -> Iterator[None]:
        """Within the block a checkpoint is saved."""
        self.saving = True
        try:
            yield
        finally:
            self.saving = False

    @property
    def latest(self) -> NotedOperation:
        return self._ring[-1] if self._ring else NOTHING

    def operations(self) -> list[NotedOperation]:
        """The latest, oldest first; those that begin meanwhile may be missing."""
        while True:
            try:
                return list(self._ring)
            except RuntimeError:  # one was begun meanwhile
                continue


current = FlightRecorder()


def _forget() -> None:
    """A forked child has no part in its parent's operations."""
    global current
    current = FlightRecorder()


os.register_at_fork(after_in_child=_forget)
