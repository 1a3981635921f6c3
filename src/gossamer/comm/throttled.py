"""Throttled transport: delays results as a network would, where network emulation is not available; approximate."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from gossamer.base.ops import AllGather, AllToAll, Coalesced, CollectiveOp, InGroup
from gossamer.base.transport import Transport
from gossamer.comm.mesh.collective_selector import prefer_collective
from gossamer.comm.network import Network
from gossamer.comm.network.cost.op_cost import DEFAULT, Chosen, NetworkCost, seconds


class ThrottledTransport:
    """Wraps another transport, and delays its results until `network` would have delivered them.

    Every operation has the cost for all workers beginning at once over idle connections; waits for slower workers are
    real. Concurrent operations share the line: their bytes leave one after another, and their latencies overlap.

        leaves = max(begun, the operation before has left) + line        answered = leaves + way

    Collectives of the user's script do not use this transport and are not delayed.
    """

    def __init__(self, inner: Transport, network: Network, collective: Chosen = DEFAULT) -> None:
        """collective: the algorithm that determines the cost of means."""
        self._inner = inner
        self._network, self._collective = network, collective
        self._prices: dict[Hashable, Price] = {}
        self._left = 0.0  # when all operations so far will have left
        self.rank, self.world = inner.rank, inner.world

    def answer(self, op: CollectiveOp) -> Any:
        return self.begin(op)()

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        now, price = time.monotonic(), self._price(op)
        self._left = max(self._left, now) + price.line_seconds
        due, answered = self._left + price.way_seconds, self._inner.begin(op)

        def wait() -> Any:
            answer = answered()
            _sleep_until(due)
            return answer

        return wait

    @property
    def links(self) -> str:
        return self._inner.links

    @links.setter
    def links(self, text: str) -> None:
        self._inner.links = text

    def prefer(self, requested: str) -> None:
        """Change the algorithm of means, and of their costs."""
        self._collective = requested
        self._prices.clear()
        prefer_collective(self._inner, requested)

    def make_progress(self) -> bool:
        return self._inner.make_progress()

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        began = time.monotonic()
        self._inner.broadcast_(tensors, source)
        nbytes, lines = (
            sum(tensor.nbytes for tensor in tensors),
            NetworkCost(self._network, collective=self._collective),
        )
        _sleep_until(began + max(lines.broadcast(nbytes, [0.0] * self.world, source)))

    def all_gather_text(self, text: str) -> list[str]:
        return self._inner.all_gather_text(text)

    def part(self, size: int) -> ThrottledTransport:
        inner = self._inner.part(size)
        first = self.rank - inner.rank
        network = self._network.among(range(first, first + inner.world))
        return ThrottledTransport(inner, network, self._collective)

    def close(self) -> None:
        self._inner.close()

    def _price(self, op: CollectiveOp) -> Price:
        """Return the cost of an operation. Cached, because operations repeat in every step."""
        form = op.map(_size)  # determines the cost
        if form not in self._prices:
            whole, way = (
                seconds(each, self._network, collective=self._collective) for each in (op, _of_first_entries(op))
            )
            self._prices[form] = Price(line_seconds=max(0.0, whole - way), way_seconds=min(whole, way))
        return self._prices[form]


class Price(NamedTuple):
    """Cost of a single operation.

    A line counts as full even if a connection does not saturate it because of loss or slow start. If a large mean takes
    more hops than a small one, their latency is attributed to the line, too.
    """

    line_seconds: float  # exclusive use of the line: the time that its bytes add
    way_seconds: float  # overlaps with other operations: the time with one element of each tensor


def _of_first_entries(op: CollectiveOp) -> CollectiveOp:
    """The operation on one element of each tensor."""
    match op:
        case Coalesced(ops):
            return replace(op, ops=tuple(map(_of_first_entries, ops)))  # type: ignore[arg-type]
        case InGroup(_, inner):
            return replace(op, op=_of_first_entries(inner))  # type: ignore[arg-type]
        case AllGather() | AllToAll():
            return replace(op.map(_first_entry), forms=None)
        case _:
            return op.map(_first_entry)


def _first_entry(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:1]


def _size(tensor: Tensor) -> tuple[int, int]:
    return tensor.numel(), tensor.element_size()


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
