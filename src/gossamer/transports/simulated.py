"""Simulated transport: collective operations answered inside one process, for one thread per worker. No sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.core.op_semantics import answer_all
from gossamer.core.ops import CollectiveOp
from gossamer.errors import MismatchError, PeerLost


class SimulatedGroup:
    """`world` transports that meet in this process, each to be used by a thread of its own.

    A worker for which the others wait for more than `patience_seconds` has left.
    """

    def __init__(self, world: int, patience_seconds: float = 60.0) -> None:
        self.world, self._patience_seconds = world, patience_seconds
        self._said: list[Any] = [None] * world
        self._heard: list[Any] = [None] * world
        self._failure: BaseException | None = None
        self._answered = 0
        self._parts: dict[int, dict[int, SimulatedGroup]] = {}
        self._dividing = threading.Lock()
        self._barrier = threading.Barrier(world, action=self._answer)
        self.transports = [SimulatedTransport(self, rank) for rank in range(world)]

    def meet(self, rank: int, said: tuple[Callable[[list[Any]], list[Any]], Any]) -> Any:
        """Wait until every rank has handed in something; all of them combine it in the same way."""
        self._said[rank] = said
        answered = self._answered
        try:
            self._barrier.wait(self._patience_seconds)
        except threading.BrokenBarrierError:
            if self._answered > answered:  # a worker left right after this round, before this thread awoke
                return self._heard[rank]
            raise self._failure or PeerLost(f"a worker left while rank {rank} waited for it") from None
        return self._heard[rank]

    def _answer(self) -> None:
        try:
            combine = self._said[0][0]
            self._heard = combine([said for _, said in self._said])
            self._answered += 1
        except MismatchError as failure:
            self._failure = failure
            raise

    def part(self, rank: int, size: int) -> SimulatedTransport:
        with self._dividing:
            blocks = self._parts.setdefault(size, {})
            block = blocks.setdefault(rank // size, SimulatedGroup(size, self._patience_seconds))
        return block.transports[rank % size]

    def leave(self) -> None:
        self._barrier.abort()
        for blocks in self._parts.values():
            for block in blocks.values():
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
        """Operations are answered at once."""
        return False

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        def hand_out(said: list[Any]) -> list[Any]:
            for theirs in said:
                for mine, original in zip(theirs, said[source], strict=True):
                    mine.copy_(original)
            return said

        with torch.no_grad():
            self._group.meet(self.rank, (hand_out, list(tensors)))

    def all_gather_text(self, text: str) -> list[str]:
        return list(self._group.meet(self.rank, (lambda said: [said] * len(said), text)))

    def part(self, size: int) -> SimulatedTransport:
        return self._group.part(self.rank, size)

    def close(self) -> None:
        self._group.leave()
