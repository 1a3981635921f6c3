"""Simulated transport: collective operations inside one process, with one thread per worker. No sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.base.op_semantics import answer_all
from gossamer.base.ops import CollectiveOp
from gossamer.comm.runtime.worker_scope import current_worker
from gossamer.errors import MismatchError, PeerLost

#: Class and message of an error, raised as a new object per thread: a raised error references its frames
Failure = tuple[type[MismatchError] | type[PeerLost], str]


class SimulatedGroup:
    """`world` connected transports in this process, each for a separate thread.

    A worker for which the others have waited for more than `patience_seconds` counts as lost.
    """

    def __init__(self, world: int, patience_seconds: float = 60.0) -> None:
        self.world, self._patience_seconds = world, patience_seconds
        self._inputs: dict[int, Any] = {}  # inputs by rank, in this round
        self._results: list[Any] = []  # results of the last round
        self._answered = 0  # completed rounds
        self._closed: set[int] = set()  # ranks that have left
        self._failure: Failure | None = None  # raised by every later round
        self._changed = threading.Condition()
        self._parts: dict[int, dict[int, SimulatedGroup]] = {}
        self.transports = [SimulatedTransport(self, rank) for rank in range(world)]

    def meet(self, rank: int, contributions: tuple[Callable[[list[Any]], list[Any]], Any]) -> Any:
        """Wait until every rank has passed an input, and return this rank's result. All ranks combine equally."""
        with current_worker().waiting(), self._changed:
            self._refuse_broken()
            self._inputs[rank], answered = contributions, self._answered
            if len(self._inputs) == self.world:
                self._answer()
            else:
                self._wait(rank, answered)
            return self._results[rank]

    def _wait(self, rank: int, answered: int) -> None:
        def over() -> bool:
            return self._answered > answered or self._failure is not None or bool(self._closed - self._inputs.keys())

        came = self._changed.wait_for(over, self._patience_seconds)
        if self._answered > answered:  # regardless of later failures
            return
        if self._failure is None:
            missing = sorted(self._closed - self._inputs.keys()) or sorted({*range(self.world)} - self._inputs.keys())
            how = "has left" if came else "has not come"
            self._break((PeerLost, f"rank {missing[0]} {how} while rank {rank} waited for it"))
        self._refuse_broken()

    def _refuse_broken(self) -> None:
        if self._failure is not None:
            kind, message = self._failure
            raise kind(message)

    def _answer(self) -> None:
        combine, _ = self._inputs[0]
        try:
            self._results = combine([self._inputs[rank][1] for rank in range(self.world)])
        except BaseException as failure:
            mismatch = (MismatchError, str(failure)) if isinstance(failure, MismatchError) else None
            self._break(mismatch or (PeerLost, "another worker has failed"))
            raise
        self._inputs, self._answered = {}, self._answered + 1
        self._changed.notify_all()

    def _break(self, failure: Failure) -> None:
        self._failure = self._failure or failure
        self._changed.notify_all()

    def part(self, rank: int, size: int) -> SimulatedTransport:
        with self._changed:
            blocks = self._parts.setdefault(size, {})
            block = blocks.get(rank // size)
            if block is None:
                block = blocks[rank // size] = SimulatedGroup(size, self._patience_seconds)
                block._closed = {each % size for each in self._closed if each // size == rank // size}
                block._failure = self._failure
        return block.transports[rank % size]

    def close(self, rank: int) -> None:
        """Leave, and wake the ranks that wait for this one."""
        with self._changed:
            self._closed.add(rank)
            self._changed.notify_all()
            blocks = [
                (rank % size, blocks[rank // size]) for size, blocks in self._parts.items() if rank // size in blocks
            ]
        for place, block in blocks:
            block.close(place)

    def leave(self) -> None:
        """Break the group: all current and later calls fail."""
        with self._changed:
            self._break((PeerLost, "the group was broken off"))
            blocks = [block for blocks in self._parts.values() for block in blocks.values()]
        for block in blocks:
            block.leave()


class SimulatedTransport:
    """One worker's end of a SimulatedGroup."""

    def __init__(self, group: SimulatedGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.world = group.world
        self.links = ""

    def answer(self, op: CollectiveOp) -> Any:
        return self._group.meet(self.rank, (answer_all, op))

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        answer = self.answer(op)
        return lambda: answer

    def make_progress(self) -> bool:
        """Return False: operations complete at once."""
        return False

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        def hand_out(contributions: list[Any]) -> list[Any]:
            for remote in contributions:
                for own, original in zip(remote, contributions[source], strict=True):
                    own.copy_(original)
            return contributions

        with torch.no_grad():
            self._group.meet(self.rank, (hand_out, list(tensors)))

    def all_gather_text(self, text: str) -> list[str]:
        return list(self._group.meet(self.rank, (lambda contributions: [contributions] * len(contributions), text)))

    def part(self, size: int) -> SimulatedTransport:
        return self._group.part(self.rank, size)

    def close(self) -> None:
        self._group.close(self.rank)
