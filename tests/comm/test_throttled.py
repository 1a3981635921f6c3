from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gossamer.base.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Coalesced,
    CollectiveOp,
    InGroup,
    NeighborAllGather,
    Script,
    payload_form,
)
from gossamer.base.runner import ScriptRun
from gossamer.comm import throttled
from gossamer.comm.network import Network, read_network
from gossamer.comm.network.cost.op_cost import seconds
from gossamer.comm.runtime.pipeline import Pipeline
from gossamer.comm.simulated import SimulatedGroup
from gossamer.comm.throttled import ThrottledTransport

ONE = torch.ones(2000)
SLOW = read_network("10mbit,20ms", 1)


def took(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


class Instant:
    """Answers each op with itself."""

    rank, world = 1, 4

    def answer(self, op: CollectiveOp) -> CollectiveOp:
        return op

    def begin(self, op: CollectiveOp) -> Callable[[], CollectiveOp]:
        return lambda: op

    def broadcast_(self, tensors: object, source: int = 0) -> None:
        self.source = source

    def all_gather_text(self, text: str) -> list[str]:
        return [text]

    def close(self) -> None:
        self.closed = True


class Clock:
    """Virtual: moves on only where somebody sleeps."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(throttled, "time", found)
    return found


@pytest.mark.parametrize(
    "op",
    [
        AllReduceMean(ONE),
        AllReduceMean(ONE.half()),
        AllGather((ONE,)),
        AllToAll((((ONE),),) * 4),
        AllGather((ONE,), tuple(payload_form((ONE[: 500 * rank],)) for rank in range(1, 5))),
        InGroup((0, 1), AllToAll(((ONE,),) * 2, (payload_form((ONE,)), payload_form((ONE, ONE))))),
        NeighborAllGather((ONE,), ((0, 0.5), (2, 0.5))),
        InGroup((0, 1), AllReduceMean(ONE)),
        Coalesced((AllReduceMean(ONE), AllGather((ONE[:10],)))),
    ],
    ids=lambda op: type(op).__name__,
)
def test_an_answer_takes_as_long_as_on_the_network(op: CollectiveOp, clock: Clock) -> None:
    network = read_network("10mbit,20ms", 4)
    transport = ThrottledTransport(Instant(), network)
    for number in (1, 2):
        assert transport.answer(op) is op
        assert clock.now == pytest.approx(100.0 + number * seconds(op, network))


# -- ops under way beside each other -----------------------------------------------------------------------------------

LINE, WAY = 8.0, 3.0  # seconds of an op of ONE; a Mean's way is twice as long


def price(op: CollectiveOp, network: Network, collective: object) -> float:
    """A line that needs a second for a thousand bytes; an op of one element has none worth mentioning."""
    tensor, hops = (op.tensor, 2) if isinstance(op, AllReduceMean) else (op.payload[0], 1)
    return tensor.numel() // 1000 * LINE / 2 + hops * WAY


Begun = list[tuple[float, CollectiveOp]]


class AllAddedUp(ThrottledTransport):
    """Broken: an op's time starts when the one before it is there."""

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        found = super().begin(op)
        self._left += self._price(op).way_seconds
        return found


class NothingShared(ThrottledTransport):
    """Broken: every op has the line for itself."""

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        self._left = 0.0
        return super().begin(op)


class LineKept(ThrottledTransport):
    """Broken: who begins late finds the line as if nobody had waited."""

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        self._left = self._left or throttled.time.monotonic()
        left = self._left
        found = super().begin(op)
        self._left = left + self._price(op).line_seconds
        return found


def arrivals(rule: type[ThrottledTransport], clock: Clock, ops: Begun) -> list[float]:
    """When each is answered that was begun so many seconds after 100; they are waited for in turn, at the end."""
    transport = rule(Instant(), SLOW)
    waits = []
    for begun, op in ops:
        clock.now = 100.0 + begun
        waits.append(transport.begin(op))
    found = []
    for wait, (_, op) in zip(waits, ops, strict=True):
        assert wait() is op
        found.append(clock.now - 100.0)
    return found


MEAN, GATHER, EMPTY = AllReduceMean(ONE), AllGather((ONE,)), AllGather((ONE[:1],))
TABLE: list[tuple[Begun, list[float]]] = [
    ([(0.0, MEAN)], [8 + 6]),
    ([(0.0, MEAN), (0.0, MEAN)], [8 + 6, 16 + 6]),  # bytes add up, ways pass at once
    ([(0.0, MEAN), (0.0, EMPTY)], [14, 14]),  # there at 8 + 3, and waited for in turn
    ([(0.0, EMPTY), (0.0, MEAN)], [3, 14]),  # nothing of it is on the line
    ([(0.0, MEAN), (5.0, GATHER)], [14, 16 + 3]),  # it leaves when the line is free
    ([(0.0, MEAN), (8.0, GATHER)], [14, 16 + 3]),
    ([(0.0, MEAN), (10.0, GATHER)], [14, 18 + 3]),  # the line has been free since 8
    ([(0.0, MEAN), (10.0, GATHER), (11.0, GATHER)], [14, 21, 26 + 3]),
    ([(0.0, GATHER)] * 4, [11, 19, 27, 35]),
    ([(0.0, MEAN), (50.0, MEAN)], [50, 64]),  # nobody asked for the first before
]


def check_arrivals(rule: type[ThrottledTransport], clock: Clock) -> None:
    for ops, expected in TABLE:
        assert arrivals(rule, clock, ops) == pytest.approx(expected)


def test_bytes_add_up_and_ways_pass_at_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttled, "seconds", price)
    check_arrivals(ThrottledTransport, clock)


@pytest.mark.parametrize("rule", [AllAddedUp, NothingShared, LineKept])
def test_other_ways_to_share_are_noticed(
    rule: type[ThrottledTransport], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throttled, "seconds", price)
    with pytest.raises(AssertionError):
        check_arrivals(rule, clock)


def test_two_buckets_that_continue_at_once_save_round_trips(clock: Clock) -> None:
    """Two ops each, of few bytes: the second ones are begun when the first answers are there."""

    def took(window: int) -> float:
        began, pipeline = clock.now, Pipeline(window)
        transport = ThrottledTransport(Instant(), read_network("1gbit,80ms", 4))
        for _ in range(2):
            pipeline.put(ScriptRun(saying(MEAN, MEAN), transport))
        pipeline.finish()
        return clock.now - began

    assert took(1) == pytest.approx(4 * 0.08, rel=0.02)
    assert took(2) == pytest.approx(2 * 0.08, rel=0.02)


def saying(*ops: CollectiveOp) -> Script:
    heard = None
    for op in ops:
        heard = yield op
    return heard


def test_what_does_not_fill_the_line_is_no_way() -> None:
    """Loss holds a stream back, and a second one over the same connection as well; a way stays a way."""
    op = AllGather((torch.empty(10**6, device="meta"),))
    clean, lossy = (ThrottledTransport(Instant(), read_network(f"1gbit,80ms{loss}", 4)) for loss in ("", ",loss=1%"))
    assert lossy._price(op).way_seconds == pytest.approx(clean._price(op).way_seconds, rel=0.01)
    assert lossy._price(op).line_seconds > 2 * clean._price(op).line_seconds


def test_the_latency_of_unequal_payloads_is_that_of_one_entry() -> None:
    network = read_network("1mbit,20ms", 4)
    alike, unequal = AllGather((ONE,)), AllGather((ONE,), (payload_form((ONE,)),) * 3 + (payload_form((ONE, ONE)),))
    first, second = (ThrottledTransport(Instant(), network)._price(op) for op in (alike, unequal))
    assert first.way_seconds == second.way_seconds
    assert first.line_seconds < second.line_seconds


def test_it_does_sleep() -> None:
    transport = ThrottledTransport(Instant(), read_network("10mbit,20ms", 4))
    assert took(lambda: transport.answer(AllGather((ONE[:1],)))) >= seconds(AllGather((ONE[:1],)), transport._network)


def test_prices_of_unlike_words_are_not_mixed_up() -> None:
    transport = ThrottledTransport(Instant(), read_network("10mbit,20ms", 4))
    small, large = AllReduceMean(ONE[:4]), AllReduceMean(ONE)
    assert transport._price(small).line_seconds < transport._price(large).line_seconds
    assert transport._price(small).way_seconds == transport._price(large).way_seconds
    assert transport._price(AllReduceMean(ONE)) == transport._price(large)


def test_the_rest_is_handed_on() -> None:
    inner = Instant()
    transport = ThrottledTransport(inner, read_network("1gbit", 4))
    assert (transport.rank, transport.world) == (1, 4)
    assert transport.all_gather_text("a") == ["a"]
    transport.broadcast_([ONE], 2)
    transport.close()
    assert (inner.source, inner.closed) == (2, True)


def test_alone_nothing_is_slowed(clock: Clock) -> None:
    transport = ThrottledTransport(SimulatedGroup(1).transports[0], SLOW)
    assert torch.equal(transport.answer(AllReduceMean(ONE)), ONE)
    assert clock.now == 100.0
