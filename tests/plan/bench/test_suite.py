"""Compressor benchmark: trials alternate, answers are those that were recorded, and ratios are what they are called."""

from __future__ import annotations

import io
import json
import os
from dataclasses import dataclass
from inspect import isabstract

import pytest
import torch

from gossamer.algorithms import compressors
from gossamer.algorithms.compressors import Compressor, Dense, Feedback, PowerSGD, TopK
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels.library import wanted_kernels
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import AllGather
from gossamer.base.runner import simulate
from gossamer.comm.environment.host_info import processor
from gossamer.plan.bench import KERNELS, case_texts, cells, remarks, replay, run_benchmarks, with_feedback, worker
from gossamer.plan.bench.interleave import interleave, spread
from gossamer.plan.bench.replay import ReplayedExchange, gradient, of_rank, prepare
from gossamer.plan.bench.suite import build
from gossamer.plan.bench.two_process import BenchError, run_pair_benchmark
from gossamer.plan.bench.worker import serve
from gossamer.plan.bench.workloads import (
    ADD,
    COPY,
    ENCODE,
    ONTO,
    Workload,
    available,
    bucket,
    many_tensors,
    places,
    products,
    rows_of,
    using,
    yardsticks,
)

LAYOUT = Layout.of({"weight": (40, 30), "bias": (7,)})


# -- turns ---------------------------------------------------------------------------------------------------------


def test_timers_take_turns_and_the_first_round_warms_up() -> None:
    calls: list[str] = []

    def timer(name: str):
        def run() -> tuple[float]:
            calls.append(name)
            return (float(len(calls)),)

        return run

    assert interleave({"a": timer("a"), "b": timer("b")}, 2) == {"a": [(3.0,), (5.0,)], "b": [(4.0,), (6.0,)]}
    assert calls == ["a", "b"] * 3


def test_spread_is_the_width_of_the_middle_half() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert spread([4.0]) == 0.0


# -- who is measured -----------------------------------------------------------------------------------------------


def test_every_compressor_is_measured_or_left_out_by_name() -> None:
    public = {name for name in compressors.__all__ if not isabstract(getattr(compressors, name))}
    measured = {text.partition("(")[0] for text in case_texts(KERNELS)}
    assert measured | {name for name, texts in KERNELS.items() if not texts} == public
    for text in case_texts(KERNELS):
        assert not with_feedback(text).wants_feedback


def test_what_is_named_replaces_what_is_by_default() -> None:
    texts = case_texts({"TopK": ["TopK(density=0.5)"], "RandomK": []})
    assert "TopK(density=0.5)" in texts
    assert "PowerSGD()" in texts
    assert not [text for text in texts if text.startswith("RandomK")]


# -- conversations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", case_texts(KERNELS))
def test_a_conversation_comes_to_what_the_group_agreed_on(text: str) -> None:
    compressor = with_feedback(text)
    (exchange,) = prepare(compressor, LAYOUT, (3,))
    exchange.out.zero_()
    encode, decode = exchange.run()
    assert encode > 0
    assert decode > 0
    assert torch.equal(exchange.out, agreed(compressor, 3))


def agreed(compressor: Compressor, world: int) -> torch.Tensor:
    """The mean of the second step of a group, without any bookkeeping."""
    x = gradient(LAYOUT)
    states = [
        compressor.init(x, AggregationContext(seed=11, rank=rank, world=world, momentum=0.9)) for rank in range(world)
    ]
    for step in range(2):
        staged: list[AggregationResult] = simulate(
            [
                compressor.aggregate(
                    of_rank(x, rank),
                    states[rank],
                    AggregationContext(step=step, seed=11, rank=rank, world=world, momentum=0.9),
                )
                for rank in range(world)
            ]
        )
        states = [each.next_state.after(old) for each, old in zip(staged, states, strict=True)]
    return staged[0].mean


def test_other_answers_come_to_something_else() -> None:
    (exchange,) = prepare(Feedback(Int8()), LAYOUT, (3,))
    exchange.answers[0] = exchange.answers[0][::-1][:2]
    exchange.run()
    assert not torch.equal(exchange.out, agreed(Feedback(Int8()), 3))


def test_conversations_share_the_first_workers_memory() -> None:
    one, four = prepare(Feedback(TopK(density=0.1)), LAYOUT, (1, 4))
    assert one.state is four.state
    assert [len(each.answers[0]) for each in (one, four)] == [1, 4]


def test_the_fewest_bytes_are_counted() -> None:
    (exchange,) = prepare(Feedback(Int8(block=100)), LAYOUT, (4,))
    n, payload = LAYOUT.numel, LAYOUT.numel + 4 * (12 + 1)
    assert exchange.least_encode_bytes == 4 * n + 2 * 4 * n + payload
    assert exchange.least_decode_bytes == 4 * payload + 4 * n


def test_a_rule_that_asks_twice_reads_its_input_twice() -> None:
    (exchange,) = prepare(with_feedback("TernGrad()"), LAYOUT, (2,))
    assert len(exchange.answers) == 2
    assert exchange.least_encode_bytes >= 2 * 4 * LAYOUT.numel


@pytest.mark.parametrize("world", [1, 4])
def test_parts_are_heard_instead_of_read_again(world: int) -> None:
    """Of a part's mean: what it owes is read and written, and it is encoded once more."""
    (exchange,) = prepare(with_feedback("Sharded(Int8())"), LAYOUT, (world,))
    n, part = LAYOUT.numel, -(-LAYOUT.numel // world)
    message = exchange.answers[1][0]
    size = sum(each.nbytes for each in message)
    assert size == pytest.approx(part * (1 + 4 / 256), rel=0.05)
    assert exchange.least_encode_bytes == 4 * n + 2 * 4 * (n + part) + (2 * world + 1) * size
    assert exchange.least_decode_bytes == world * size + 4 * n


def test_groups_that_remember_other_things_share_no_memory() -> None:
    one, four = prepare(with_feedback("Sharded(Int8())"), LAYOUT, (1, 4))
    assert one.state["owed"].flat.numel() == LAYOUT.numel
    assert four.state["owed"].flat.numel() == -(-LAYOUT.numel // 4)
    for exchange in (one, four):
        assert min(exchange.run()) > 0


@dataclass
class Clock:
    """A clock that shows what it is told; `rate` seconds pass with every look at it."""

    now: float = 0.0
    rate: float = 0.0

    def perf_counter(self) -> float:
        self.now += self.rate
        return self.now


@dataclass(frozen=True, repr=False)
class Slow(Compressor):
    """Encodes for 2 s and decodes for 4 s of a clock."""

    clock: Clock

    def aggregate(
        self, x: FlatTensors, state: State, at: AggregationContext, out: torch.Tensor | None = None
    ) -> Aggregation:
        self.clock.now += 2.0
        yield AllGather((torch.ones(1),))
        self.clock.now += 4.0
        return AggregationResult(mean=x.flat, own_contribution=lambda: x.flat)


def test_time_before_the_last_word_is_encoding_and_after_it_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(replay, "time", clock)
    exchange = ReplayedExchange(
        Slow(clock), gradient(LAYOUT), State(), AggregationContext(world=1), torch.empty(1), [[(torch.ones(1),)]]
    )
    assert tuple(exchange.run()) == (2.0, 4.0)


def test_a_script_that_continues_is_noticed() -> None:
    (exchange,) = prepare(Feedback(PowerSGD(rank=2)), LAYOUT, (2,))
    exchange.answers.pop()
    with pytest.raises(AssertionError, match="more operations"):
        exchange.run()


# -- rows ----------------------------------------------------------------------------------------------------------


def fixed(subject: str, layout: Layout, parts: tuple[tuple[str, int], ...], *seconds: float) -> Workload:
    return Workload(
        subject=subject, kernels="torch", layout=layout, payloads=1, entries=0, parts=parts, timer=lambda: seconds
    )


def test_ratios_are_what_they_are_called() -> None:
    layout = Layout.of({"weight": (1000,)})
    rows = [
        fixed(COPY, layout, (("whole", 8000),), 2e-6),
        fixed(ADD, layout, (("whole", 12000),), 3e-6),
        fixed("X()", layout, (("encode", 6000), ("decode", 2000)), 6e-6, 1e-6),
    ]
    *_, encode, decode = run_benchmarks(rows, 3, lambda what: None)
    assert encode.gradient_bytes_per_second == pytest.approx(4000 / 6e-6)
    assert encode.copy_ratio == pytest.approx(3.0)
    assert encode.add_rate_share == pytest.approx(6000 / 4e9 / 6e-6)
    assert (decode.part, decode.add_rate_share) == ("decode", pytest.approx(0.5))


def test_buckets_have_the_elements_that_were_asked_for() -> None:
    assert bucket(25_000_000).numel == pytest.approx(25_000_000, rel=0.01)
    assert bucket(100_000).numel == pytest.approx(100_000, rel=0.05)
    assert (len(many_tensors()), many_tensors().numel) == (200, 200_000)


def test_rows_are_measured_with_both_implementations() -> None:
    rows = rows_of(Feedback(TopK(density=0.01)), bucket(100_000))
    assert {row.kernels for row in rows} == set(available())
    for name in available():
        assert {1, 4, 64} <= {row.payloads for row in rows if row.kernels == name}


def test_small_buckets_are_timed_with_warm_caches(monkeypatch) -> None:
    ran: list[int] = []

    def run(exchange: ReplayedExchange) -> tuple[float, float]:
        ran.append(len(exchange.x.layout))
        return (0.005, 0.001) if len(ran) % 2 else (0.004, 0.002)

    monkeypatch.setattr(ReplayedExchange, "run", run)
    rows = rows_of(Dense("bfloat16"), bucket(100_000))
    ran.clear()
    assert {tuple(row.timer()) for row in rows if len(row.layout) in (1, 200)} == {(0.004, 0.001)}
    assert len(ran) == 2 * len([row for row in rows if len(row.layout) in (1, 200)])
    ran.clear()
    next(row for row in rows if len(row.layout) not in (1, 200)).timer()
    assert len(ran) == 1


def test_implementations_are_switched_and_switched_back() -> None:
    before, asked = wanted_kernels(), os.environ.get("GOSSAMER_KERNELS")
    with using("reference"):
        assert wanted_kernels() == "reference"
    assert (wanted_kernels(), os.environ.get("GOSSAMER_KERNELS")) == (before, asked)


def test_yardsticks_and_products_run() -> None:
    layout = bucket(20_000)
    for row in (*yardsticks(layout), products(layout, 4), *places(layout)):
        assert all(seconds > 0 for seconds in row.timer())


def test_the_report_has_a_line_for_each_implementation() -> None:
    found = run_benchmarks(
        build([Feedback(PowerSGD()), Dense("bfloat16")], 100_000, lambda what: None), 1, lambda what: None
    )
    lines = cells(found)
    assert [(line["compressor"], line["kernels"]) for line in lines] == [
        (name, kernels)
        for name in ("Feedback(PowerSGD())", "Dense(dtype='bfloat16')")
        for kernels in reversed(available())
    ]
    assert len({tuple(line) for line in lines}) == 1
    sentences = list(remarks(found))
    assert sum("matrix products" in sentence for sentence in sentences) == 1
    assert sum(sentence.startswith(ONTO) for sentence in sentences) == 3
    assert all(one.add_rate_share > 0 for one in found if one.part == ENCODE)


def test_a_processor_has_a_name(tmp_path) -> None:
    table = tmp_path / "cpuinfo"
    table.write_text("processor\t: 0\nmodel name\t: Some Processor\n")
    assert processor(table).startswith("Some Processor (")
    assert processor(tmp_path / "nothing")


# -- two at once ---------------------------------------------------------------------------------------------------


def test_a_worker_prepares_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "time", Clock(rate=0.25))
    answers = io.StringIO()
    commands = [{"subject": "TopK(density=0.01)"}, {"seconds": 1.0}]
    threads = torch.get_num_threads()
    serve(10_000, io.StringIO("".join(json.dumps(command) + "\n" for command in commands)), answers)
    torch.set_num_threads(threads)
    prepared, rate = map(json.loads, answers.getvalue().splitlines())
    assert prepared is None
    assert rate == 4.0


@pytest.mark.processes
def test_a_worker_that_fails_is_no_measurement(capfd) -> None:
    with pytest.raises(BenchError, match="ended with 1"):
        run_pair_benchmark(["NoSuchThing()"], 10_000, 1, 0.01, lambda what: None)
    assert "NoSuchThing" in capfd.readouterr().err
