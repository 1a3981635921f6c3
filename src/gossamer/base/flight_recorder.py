"""Flight recorder: the latest collective operations of this process, in a ring buffer, and the one it waits for.

Communicating threads write one reference at a time; readers in any thread see a consistent snapshot. Nothing is sent,
and no tensor is kept.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from gossamer.base import system
from gossamer.base.spans.record_format import code_of, operation_text

MOST_OPERATIONS = 200


class RankedGroup(Protocol):
    """A transport with counted operations."""

    rank: int
    world: int


class NotedOperation:
    """One operation. Times are seconds of time.perf_counter(); answered is 0 until the answer arrives.

    group: this rank in the group, and the group's size; number: among the group's operations, from 0, the same on every
    rank; kinds: names of the operations in it (Operation.names), or its name; bucket: its index in the step, from 1, or
    0.
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
        self.waits_for: tuple[int, ...] = ()  # ranks of the group that it waits for, set after a long wait

    @property
    def name(self) -> str:
        return self.kinds if isinstance(self.kinds, str) else operation_text(code_of(set(self.kinds)))


# Placeholder for no operation; writes to it have no effect
NOTHING = NotedOperation((0, 1), -1, "nothing", 0.0, 0, 0, 0.0)


class FlightRecorder:
    """The operations of one process. `waiting` is the one that a thread waits for, or NOTHING."""

    def __init__(self, room: int = MOST_OPERATIONS) -> None:
        self._ring: deque[NotedOperation] = deque(maxlen=room)
        self._counts: dict[tuple[int, int], Iterator[int]] = {}
        self.waiting = NOTHING
        self.begun = 0  # number of operations
        self.step = 0  # of the operations that begin now
        self.buckets = 0  # per step; 0: unknown
        self.saving = False

    def begin(
        self, group: RankedGroup, kinds: Collection[str] | str, nbytes: float, began: float, bucket: int = 0
    ) -> NotedOperation:
        """Record the start of an operation.

        All ranks of a group begin the same ones in the same order, so counting is enough.
        """
        key = group.rank, group.world
        operation_number: int | None = getattr(group, "operation_number", None)
        if operation_number is None:
            numbers = self._counts.get(key)
            operation_number = next(numbers if numbers is not None else self._counts.setdefault(key, itertools.count()))
        noted = NotedOperation(key, operation_number, kinds, nbytes, self.step, bucket, began)
        self._ring.append(noted)
        self.begun += 1
        return noted

    @contextmanager
    def call(self, group: RankedGroup, name: str) -> Iterator[None]:
        """Record a call of all ranks, which is answered immediately, for the duration of the block."""
        noted = self.begin(group, name, 0.0, time.perf_counter())
        self.waiting = noted
        yield
        self.waiting, noted.answered = NOTHING, time.perf_counter()

    @contextmanager
    def save(self) -> Iterator[None]:
        """Record that a checkpoint is saved, for the duration of the block."""
        self.saving = True
        try:
            yield
        finally:
            self.saving = False

    @property
    def latest(self) -> NotedOperation:
        return self._ring[-1] if self._ring else NOTHING

    def operations(self) -> list[NotedOperation]:
        """Return the latest operations, oldest first; those that begin in the meantime may be missing."""
        while True:
            try:
                return list(self._ring)
            except RuntimeError:  # another thread appended
                continue


current = FlightRecorder()


def _forget() -> None:
    """Discard the parent's operations in a forked child."""
    global current
    current = FlightRecorder()


system.after_fork_in_child(_forget)
