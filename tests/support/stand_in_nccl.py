"""NCCL's stand-in: groups of threads that behave as its communicators do where a rank dies, and no GPU anywhere.

Work that a dead rank owes something never ends. Once its communicator is aborted it ends as if all were well, with
anything in its memory. Ranks of a group find each other by a key in their store; a key of a group that is no more leads
there.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from gossamer.base.op_semantics import rank_order_mean

SECONDS = 20.0
KEY = "id"


class Incarnation:
    """What ranks of one group share."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.joined: set[int] = set()
        self.said: dict[int, dict[int, Tensor]] = {}  # by operation and rank
        self.changed = threading.Condition()

    def join(self, rank: int) -> None:
        """Return when all have, as NCCL does."""
        with self.changed:
            assert rank not in self.joined, f"rank {rank} joined a group that had a life before"
            self.joined.add(rank)
            self.changed.notify_all()
            if not self.changed.wait_for(lambda: len(self.joined) == self.world, SECONDS):
                raise RuntimeError("a rank did not come")


class StandInWork:
    """One rank's part of one operation. out: where the answer goes; answer: of all that was said, by rank."""

    def __init__(
        self, group: StandInGroup, number: int, out: Tensor, answer: Callable[[Sequence[Tensor]], Tensor]
    ) -> None:
        self._group, self._number, self._out, self._answer, self._filled = group, number, out, answer, False

    def is_completed(self) -> bool:
        said = self._group.incarnation.said[self._number]
        if not self._filled and self._group.aborted.is_set():
            self._out.view(torch.uint8).fill_(255)  # not a number, of whatever format
            self._filled = True
        elif not self._filled and len(said) == self._group.incarnation.world:
            self._out.copy_(self._answer([said[rank] for rank in sorted(said)]))
            self._filled = True
        return self._filled

    def wait(self, timeout: timedelta) -> bool:
        assert self._filled, "it is not done"
        if self._group.failure is not None:
            raise self._group.failure
        return True


class StandInGroup:
    """One rank's end."""

    def __init__(self, incarnation: Incarnation, rank: int, log: list[str]) -> None:
        self.incarnation, self.rank, self.log = incarnation, rank, log
        self.aborted, self.begun = threading.Event(), threading.Event()
        self.failure: Exception | None = None
        self._next = 0

    def _begin(self, mine: Tensor, out: Tensor, answer: Callable[[Sequence[Tensor]], Tensor]) -> StandInWork:
        number, self._next = self._next, self._next + 1
        with self.incarnation.changed:
            self.incarnation.said.setdefault(number, {})[self.rank] = mine.clone()
        self.begun.set()
        return StandInWork(self, number, out, answer)

    def allreduce(self, tensors: list[Tensor], options: Any) -> StandInWork:
        (mean,) = tensors
        assert options.reduceOp == torch.distributed.ReduceOp.AVG
        return self._begin(mean, mean, lambda said: rank_order_mean(list(said)))

    def _allgather_base(self, heard: Tensor, mine: Tensor, options: Any) -> StandInWork:
        return self._begin(mine, heard, lambda said: torch.cat(list(said)))

    def abort(self) -> None:
        assert not self.aborted.is_set(), "aborted twice"
        self.log.append("aborted")
        self.aborted.set()


class StandInNccl:
    """Forms groups, in one process for all ranks. before: called by each rank before it joins one."""

    def __init__(self) -> None:
        self.incarnations: dict[str, Incarnation] = {}
        self.groups: dict[int, list[StandInGroup]] = {}  # by rank, as they were formed
        self.logs: dict[int, list[str]] = {}
        self.formed = threading.Semaphore(0)  # counts what was formed
        self._lock = threading.Lock()
        self.before: Callable[[int], object] = lambda rank: None

    def form(self, store: Any, rank: int, world: int, device: torch.device) -> StandInGroup:
        log = self.logs.setdefault(rank, [])
        log.append("forms")
        self.before(rank)
        if rank == 0 and not store.check([KEY]):
            store.set(KEY, uuid.uuid4().hex)
        with self._lock:
            incarnation = self.incarnations.setdefault(store.get(KEY).decode(), Incarnation(world))
        incarnation.join(rank)
        log.append("formed")
        group = StandInGroup(incarnation, rank, log)
        self.groups.setdefault(rank, []).append(group)
        self.formed.release()
        return group
