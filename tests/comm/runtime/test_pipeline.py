"""Pipelining of several scripts: one order on every rank, fewer round trips, the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laws.laws import in_threads
from support.virtual_workers import Worker, batch, cluster, network
from torch import Tensor

from gossamer.algorithms.compressors import Compressor, Feedback, PowerSGD, Sharded
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.base import rng
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.layout import FlatTensors
from gossamer.base.ops import AllGather, AllReduceMean, AllToAll, CollectiveOp, NeighborAllGather, Script
from gossamer.base.runner import ScriptCost, ScriptRun
from gossamer.comm.runtime.pipeline import DEPTH, FIRST_TRIAL, TRIAL_DEPTHS, Pipeline, PipelineTuner, issue_order
from gossamer.comm.simulated import SimulatedGroup, SimulatedTransport

WORLD = 3
ROUND_TRIP = 1.0

# -- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "window", "table"),
    [
        ([], 2, []),
        ([1], 2, [(0, 0)]),
        ([2, 2], 1, [(0, 0), (0, 1), (1, 0), (1, 1)]),
        ([1, 1, 1], 2, [(0, 0), (1, 0), (2, 0)]),
        ([2, 2, 2], 2, [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]),
        ([3, 3, 3], 2, [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2), (2, 1), (1, 2), (2, 2)]),
        ([2, 2, 2, 2], 3, [(0, 0), (1, 0), (2, 0), (0, 1), (3, 0), (1, 1), (2, 1), (3, 1)]),
        ([3, 0, 1, 2], 2, [(0, 0), (0, 1), (2, 0), (0, 2), (3, 0), (3, 1)]),
    ],
)
def test_the_order_is_a_table(rounds: list[int], window: int, table: list[tuple[int, int]]) -> None:
    assert issue_order(rounds, window) == table


class Noting:
    """Says so many ops, and notes when each is begun and when its answer is waited for."""

    def __init__(self, number: int, rounds: int, notes: list[tuple[str, int, int]]) -> None:
        self._number, self._rounds, self._notes, self._said = number, rounds, notes, 0

    def advance(self) -> bool:
        if self._said:
            self._notes.append(("hear", self._number, self._said - 1))
        if self._said == self._rounds:
            return False
        self._notes.append(("begin", self._number, self._said))
        self._said += 1
        return True


def noted(rounds: Sequence[int], window: int = 2) -> list[tuple[str, int, int]]:
    notes: list[tuple[str, int, int]] = []
    pipeline = Pipeline(window)
    for number, count in enumerate(rounds):
        pipeline.put(Noting(number, count, notes))
    pipeline.finish()
    return notes


def check_order(rounds: Sequence[int], window: int, table: Sequence[tuple[int, int]]) -> None:
    assert [(script, round_) for what, script, round_ in noted(rounds, window) if what == "begin"] == table


@pytest.mark.parametrize("seed", range(40))
def test_words_are_begun_in_the_order_of_the_table(seed: int) -> None:
    random = Random(seed)
    rounds, window = [random.randrange(5) for _ in range(random.randrange(8))], random.randint(1, 4)
    check_order(rounds, window, issue_order(rounds, window))


def test_another_table_is_noticed() -> None:
    with pytest.raises(AssertionError):
        check_order([2, 2, 2], 2, issue_order([2, 2, 2], 1))


def test_answers_are_waited_for_as_late_as_the_next_round_allows() -> None:
    assert noted([2, 2]) == [
        ("begin", 0, 0),
        ("begin", 1, 0),
        ("hear", 0, 0),
        ("begin", 0, 1),
        ("hear", 1, 0),
        ("begin", 1, 1),
        ("hear", 0, 1),
        ("hear", 1, 1),
    ]


def test_what_was_put_in_last_is_not_waited_for() -> None:
    notes: list[tuple[str, int, int]] = []
    pipeline = Pipeline()
    pipeline.put(Noting(0, 2, notes))
    assert notes == [("begin", 0, 0)]
    pipeline.finish()
    pipeline.finish()  # there is nothing left
    assert len(notes) == 4


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Pipeline(0)


# -- in virtual time --------------------------------------------------------------------------------------------------


class Clock(threading.local):
    """Every rank's own."""

    now = 0.0


class Faraway:
    """Answers a round trip after the last rank has said the op; refuses ranks that do so in another order."""

    def __init__(self, inner: SimulatedTransport, clock: Clock) -> None:
        self._inner, self._clock = inner, clock
        self.rank, self.world = inner.rank, inner.world
        self.due: list[float] = []

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        due = self._meet(f"begin {form(op)}") + ROUND_TRIP
        answered = self._inner.begin(op)
        self.due.append(due)

        def wait() -> Any:
            self._meet(f"wait for {form(op)}")
            self._clock.now = max(self._clock.now, due)
            return answered()

        return wait

    def _meet(self, what: str) -> float:
        """The moment at which the last rank is there."""
        texts = self._inner.all_gather_text(f"{what}@{self._clock.now}")
        said, moments = zip(*(text.split("@") for text in texts), strict=True)
        assert len(set(said)) == 1, f"the ranks did different things at once: {said}"
        return max(map(float, moments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def form(op: CollectiveOp) -> str:
    """What tells ops apart: no two buckets are equally large."""
    match op:
        case AllReduceMean(tensor):
            return f"mean {tensor.shape}"
        case AllGather(payload) | NeighborAllGather(payload):
            return f"{type(op).__name__} {[each.shape for each in payload]}"
        case AllToAll(parts):
            return f"exchange {[each.shape for each in parts[0]]}"
        case _:
            return str([form(each) for each in op.ops])


def taking(script: Script, clock: Clock, seconds: Iterator[float]) -> Generator[CollectiveOp, Any, Any]:
    """The same script, which computes so long before each op and after the last."""
    answer: Any = None
    while True:
        clock.now += next(seconds)
        try:
            op = script.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = yield op


class ByReadiness(Pipeline):
    """Broken: goes on with whatever has its answer here."""

    def __init__(self, clock: Clock, transport: Faraway) -> None:
        super().__init__()
        self._clock, self._transport = clock, transport
        self._open: list[tuple[float, int, Any]] = []

    def put(self, going: Any) -> None:
        self._go_on(len(self._open), going)
        for turn in sorted(self._open):
            if turn[0] <= self._clock.now:
                self._open.remove(turn)
                self._go_on(*turn[1:])

    def finish(self) -> None:
        while self._open:
            turn = min(self._open)
            self._open.remove(turn)
            self._go_on(*turn[1:])

    def _go_on(self, number: int, going: Any) -> None:
        if going.advance():
            self._open.append((self._transport.due[-1], number, going))


class CountedTwice(ScriptRun):
    """Broken: all the time since an op was begun counts as the wire's."""

    begun: float | None = None

    def __init__(self, script: Script, transport: Any, clock: Clock) -> None:
        super().__init__(script, transport)
        self._clock = clock

    def advance(self) -> bool:
        if self.begun is not None:
            self._wire += self._clock.now - self.begun
        going = super().advance()
        self.begun = self._clock.now
        return going


def buckets(rank: int) -> list[FlatTensors]:
    """Four, with integers whose sums are exact."""
    found = []
    for number in range(4):
        shapes = {"matrix": (8, 16 + 2 * number), "vector": (3 + number,)}
        packed = FlatTensors.pack({name: torch.empty(shape) for name, shape in shapes.items()})
        generator = rng.generator(rank, "bucket", number)
        packed.flat.copy_(torch.randint(-8, 8, packed.flat.shape, generator=generator))
        found.append(packed)
    return found


Belt = Callable[[Clock, Faraway], Pipeline]
Speaker = Callable[[Script, Any, Clock], ScriptRun]


def travelled(
    monkeypatch: pytest.MonkeyPatch,
    belt: Belt,
    compressor: Compressor,
    *,
    computing: Callable[[int], Iterator[float]] = lambda rank: iter(lambda: 0.0, None),
    speaker: Speaker = lambda script, transport, clock: ScriptRun(script, transport),
) -> list[tuple[list[ScriptCost], float]]:
    """By rank: what came of all buckets, and the moment at which all was over."""
    clock = Clock()
    monkeypatch.setattr("gossamer.base.runner.time", SimpleNamespace(perf_counter=lambda: clock.now))
    group = SimulatedGroup(WORLD)

    def work(rank: int) -> tuple[list[ScriptCost], float]:
        transport, at, seconds = (
            Faraway(group.transports[rank], clock),
            AggregationContext(rank=rank, world=WORLD),
            computing(rank),
        )
        pipeline, performances = belt(clock, transport), []
        for bucket in buckets(rank):
            script = compressor.aggregate(bucket, compressor.init(bucket, at), at)
            performances.append(speaker(taking(script, clock, seconds), transport, clock))
            pipeline.put(performances[-1])
        pipeline.finish()
        return [each.performed for each in performances], clock.now

    return in_threads(work, WORLD)


def serial(clock: Clock, transport: Faraway) -> Pipeline:
    return Pipeline(window=1)


def pipelined(clock: Clock, transport: Faraway) -> Pipeline:
    return Pipeline()


def wide(clock: Clock, transport: Faraway) -> Pipeline:
    return Pipeline(window=4)


COMPRESSORS = [PowerSGD(rank=2), Sharded(Int8()), Feedback(Sharded(Int8())), Feedback(PowerSGD(rank=1))]


@pytest.mark.parametrize(("belt", "round_trips"), [(serial, 8), (pipelined, 4), (wide, 2)])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_words_that_travel_together_save_round_trips(
    monkeypatch: pytest.MonkeyPatch, belt: Belt, round_trips: int, compressor: Compressor
) -> None:
    assert {end for _, end in travelled(monkeypatch, belt, compressor)} == {round_trips * ROUND_TRIP}


def everything(staged: AggregationResult) -> Tensor:
    owed = [] if staged.owed is None else [staged.owed]
    return torch.cat([staged.mean, staged.own, *owed, *(packed.flat for packed in staged.next_state.values())])


def check_bits(monkeypatch: pytest.MonkeyPatch, belt: Belt, compressor: Compressor) -> None:
    apart, beside = (travelled(monkeypatch, each, compressor) for each in (serial, belt))
    for (one, _), (other, _) in zip(apart, beside, strict=True):
        for here, there in zip(one, other, strict=True):
            assert torch.equal(everything(here.result), everything(there.result))
            assert here.bytes_sent == there.bytes_sent > 0


@pytest.mark.parametrize("belt", [pipelined, wide])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_bits_are_those_of_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, belt: Belt, compressor: Compressor
) -> None:
    check_bits(monkeypatch, belt, compressor)


class Scribbling(PowerSGD):
    """Broken: every bucket is encoded into the same memory, whether or not the one before is still under way."""

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        room = SCRIBBLED[at.rank][: x.flat.numel()]
        mean = yield AllReduceMean(room.copy_(x.flat), room)
        mean = mean.clone()
        return AggregationResult(mean=mean, own_contribution=lambda: mean)


SCRIBBLED = torch.empty(WORLD, 1000)


def test_memory_that_buckets_share_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    check_bits(monkeypatch, serial, Scribbling())
    with pytest.raises(AssertionError):
        check_bits(monkeypatch, pipelined, Scribbling())


def uneven(rank: int) -> Iterator[float]:
    random = Random(rank)
    return iter(lambda: random.choice([0.0, 0.125, 0.5, 2.0]), None)


@pytest.mark.parametrize("belt", [serial, pipelined, wide])
def test_ranks_of_any_speed_begin_words_in_the_same_order(monkeypatch: pytest.MonkeyPatch, belt: Belt) -> None:
    travelled(monkeypatch, belt, PowerSGD(rank=2), computing=uneven)


def test_an_order_by_readiness_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="different things at once"):
        travelled(monkeypatch, ByReadiness, PowerSGD(rank=2), computing=uneven)


# -- what it took -----------------------------------------------------------------------------------------------------


def check_seconds(monkeypatch: pytest.MonkeyPatch, speaker: Speaker) -> None:
    """A quarter before each op and after the last: 12 of them for 4 scripts, and nothing is counted twice."""
    found = travelled(
        monkeypatch, pipelined, PowerSGD(rank=2), computing=lambda rank: iter(lambda: 0.25, None), speaker=speaker
    )
    for performed, end in found:
        assert [each.encode_seconds for each in performed] == [0.25] * 4
        assert [each.decode_seconds for each in performed] == [0.5] * 4
        assert end == 3.0 + sum(each.wire_seconds for each in performed)
        assert 0 < sum(each.wire_seconds for each in performed) < 4 * ROUND_TRIP


def test_seconds_add_up_to_what_the_thread_has_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    check_seconds(monkeypatch, lambda script, transport, clock: ScriptRun(script, transport))


def test_hidden_seconds_that_count_twice_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        check_seconds(monkeypatch, CountedTwice)


# -- Pipeline tuning in sessions: which depths are tried, the same on all ranks ----------------------------------------

FIRST = FIRST_TRIAL + len(TRIAL_DEPTHS)  # exchanges until the first comparison


def check_sessions_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """One window an exchange, on both ranks."""
    seen: list[int] = []
    honest = Pipeline.__init__

    def noted(self: Pipeline, window: int = DEPTH) -> None:
        seen.append(window)
        honest(self, window)

    monkeypatch.setattr(Pipeline, "__init__", noted)

    def work(worker: Worker) -> None:
        model = network(worker.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker.attach(model, optimizer, "PowerSGD(rank=2)")
        for step in range(FIRST):
            optimizer.zero_grad()
            inputs, targets = batch(step, worker.rank)
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    cluster(work, 2)
    assert seen[::2] == seen[1::2] == [2, 2, 2, 1, 2, 2, 1, 1, 2, 2, 1]


def test_sessions_try_both(monkeypatch: pytest.MonkeyPatch) -> None:
    check_sessions_try(monkeypatch)


def test_a_session_that_forgets_what_it_tried_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PipelineTuner, "ended", lambda self, seconds: None)
    with pytest.raises(AssertionError):
        check_sessions_try(monkeypatch)
