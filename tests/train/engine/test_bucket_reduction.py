"""Reduction of several buckets: the same bits however many travel at once, and failures while others are in flight."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.forwarding import ForwardingTransport
from support.virtual_workers import Worker, batch, cluster, heard, network, parameters, train_step
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from gossamer import events
from gossamer.algorithms.compressors import Compressor, PowerSGD
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.layout import FlatTensors
from gossamer.base.ops import AllGather, AllReduceMean, Coalesced, CollectiveOp
from gossamer.base.runner import simulate
from gossamer.base.transport import Transport
from gossamer.comm.runtime.comm_thread import CommThread, Work
from gossamer.comm.runtime.pipeline import Pipeline
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import PeerLost
from gossamer.train.engine.bucket import NO_INPUT, Bucket, assign_buckets
from gossamer.train.engine.bucket_reduction import StepReduction, StepTrailer, with_own
from gossamer.train.engine.parameter_check import ParameterCheck
from gossamer.train.engine.step_decision import Presence, StepReport, decide, encode

RECIPES = [
    "Dense()",
    "PowerSGD(rank=2)",
    "Feedback(Sharded(Int8()))",
    "Route(Feedback(PowerSGD(2)), rest=Feedback(Int8()))",
    "DiLoCo(4, outer_momentum=0.5, fragments=2, delay=1) + PowerSGD(rank=2)",
    "LocalSGD(2) + Int8()",
]

UNCHECKED = ParameterCheck(nn.Module(), {}, "off", rank=0)


class Noting(ForwardingTransport):
    """A transport that notes what was begun: the numbers of elements in each mean."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.begun: list[int] = []

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        ops = op.ops if isinstance(op, Coalesced) else (op,)
        self.begun += [each.tensor.numel() for each in ops if isinstance(each, AllReduceMean)]
        return self._inner.begin(op)


def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each parameter."""
    monkeypatch.setattr("gossamer.train.synchronizers.stages.assign_buckets", partial(assign_buckets, bucket_bytes=1))


def trained(recipe: str, wrap: Any = lambda transport: transport) -> Tensor:
    def work(worker: Worker) -> Tensor:
        model = network(worker.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        session = worker.attach(model, optimizer, recipe)
        for step in range(8):
            train_step(model, optimizer, step, worker.rank)
        assert len(session._synchronizer.buckets) == 6
        return parameters(model)

    first, *others = cluster(work, 3, wrap)
    if not recipe.startswith("DiLoCo"):  # its workers part between two sync rounds
        assert all(torch.equal(first, other) for other in others)
    return first


def go_at_once(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    honest = Pipeline.__init__
    monkeypatch.setattr(Pipeline, "__init__", lambda self, _=2: honest(self, window))


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_ends_with_the_same_bits_however_many_buckets_travel(
    monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    small_buckets(monkeypatch)
    usual = trained(recipe)
    for window in (1, 4):
        go_at_once(monkeypatch, window)
        assert torch.equal(trained(recipe), usual)


def check_order(window: int) -> None:
    """Of a bucket's two means the second is begun after the next bucket's first."""
    transport = Noting(SimulatedGroup(1).transports[0])
    shapes: list[tuple[int, ...]] = [(10, 12), (14, 16), (18, 20)]
    cargo = [bucket({f"{number}": shape}) for number, shape in enumerate(shapes)]
    exchanged(
        StepReduction(PowerSGD(rank=2), transport, list("012"), AggregationContext(), 1.0, 1.0, window=window), cargo
    )
    assert transport.begun == [2 * size for size in (10, 14, 12, 18, 16, 20)]


def bucket(shapes: dict[str, tuple[int, ...]], compressor: Compressor | None = None) -> Bucket:
    parameters = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    found = Bucket(parameters, compressor or PowerSGD(rank=2), AggregationContext())
    found.flat.copy_(torch.arange(found.flat.numel()) % 7)
    return found


def exchanged(round_: StepReduction, cargo: list[Bucket]) -> None:
    *before, last = cargo
    for each in before:
        round_.exchange(each, NO_INPUT, 1.0)
    round_.close(last, NO_INPUT, 1.0, closing())


def closing() -> StepTrailer:
    nothing = np.zeros(0, dtype=bool)
    report = StepReport(
        weight=1.0,
        presence=Presence.TRAINING,
        settings=0,
        steps=0,
        sample=0,
        used=nothing,
        moved=nothing,
    )
    return StepTrailer(report=report, settings="", check=UNCHECKED, buffers=())


def test_a_bucket_s_second_word_follows_the_next_one_s_first() -> None:
    check_order(window=2)


def test_one_after_the_other_is_noticed() -> None:
    with pytest.raises(AssertionError):
        check_order(window=1)


@dataclass(frozen=True, repr=False)
class OfLength(Compressor):
    """Broken in no way: says as many means as a bucket has entries, so that the last bucket ends first."""

    wants_feedback = False

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        return State()

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        mean = x.flat.clone()
        for _ in range(x.flat.numel()):
            mean = yield AllReduceMean(mean)
        return AggregationResult(mean=mean, own_contribution=lambda: mean)


def check_places(in_place: Callable[[StepReduction], list[AggregationResult]]) -> None:
    cargo = [bucket({f"{length}": (length,)}, OfLength()) for length in (4, 1, 2)]
    round_ = StepReduction(
        OfLength(), SimulatedGroup(1).transports[0], ["4", "1", "2"], AggregationContext(), 1.0, 1.0, keep=with_own
    )
    exchanged(round_, cargo)
    assert [staged.mean.numel() for staged in in_place(round_)] == [4, 1, 2]


def test_what_was_agreed_on_is_kept_in_the_buckets_order() -> None:
    check_places(lambda round_: round_.staged)


def test_the_order_of_endings_is_another() -> None:
    with pytest.raises(AssertionError):
        check_places(lambda round_: list(round_._staged.values()))


# -- failures ---------------------------------------------------------------------------------------------------------


def check_nothing_happened(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """A number that is not finite, in the third of six buckets, on one rank: nobody makes this step."""
    small_buckets(monkeypatch)

    def work(worker: Worker) -> None:
        model = network(worker.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = worker.attach(model, optimizer, recipe)
        for step in range(3):
            if step == 2:
                before, kept = parameters(model), {k: v.clone() for k, v in memory(session).items()}
            optimizer.zero_grad()
            inputs, targets = batch(step, worker.rank)
            mse_loss(model(inputs), targets).backward() if step < 2 else _overflow(model, inputs, worker.rank == 1)
            optimizer.step()
        assert session.steps == 2
        assert torch.equal(parameters(model), before)
        assert all(torch.equal(kept[key], value) for key, value in memory(session).items())

    with heard(events.Skipped) as skipped:
        cluster(work, 2)
    assert {(event.rank, event.tensor) for event in skipped} == {(1, "2.bias")}


def _overflow(model: torch.nn.Module, inputs: Tensor, infinite: bool) -> None:
    (model(inputs).sum() + (model.get_parameter("2.bias") * (torch.inf if infinite else 1.0)).sum()).backward()


def memory(session: Any) -> dict[str, Tensor]:
    state = session.state_dict()["state"]
    return {f"{name} {key}": value for name, kept in state.items() for key, value in kept.items()}


@pytest.mark.parametrize("recipe", ["PowerSGD(rank=2)", "Feedback(TopK(0.5))"])
def test_a_step_is_skipped_whole_whichever_bucket_is_not_finite(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    check_nothing_happened(monkeypatch, recipe)


def test_a_report_that_was_written_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(self: StepReduction, trailer: StepTrailer) -> Generator[Any, Any, Any]:
        received = yield AllGather((encode(trailer.report),))
        return decide([text for (text,) in received], trailer.report)

    monkeypatch.setattr(StepReduction, "_conclude", early)
    with pytest.raises(AssertionError):
        check_nothing_happened(monkeypatch, "PowerSGD(rank=2)")


@dataclass
class Breaking:
    """A group of one whose answers come, until the one that is waited for as number `last` does not."""

    last: int
    rank: int = 0
    world: int = 1
    begun: list[CollectiveOp] = field(default_factory=list)

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        number = len(self.begun)
        self.begun.append(op)

        def wait() -> Any:
            if number == self.last:
                raise PeerLost(f"nobody answered word {number}")
            return simulate([_saying(op)])[0]

        return wait


def _saying(op: CollectiveOp) -> Generator[CollectiveOp, Any, Any]:
    return (yield op)


class Refusing(PowerSGD):
    """Cannot encode one of the buckets."""

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        if "1" in x.layout.by_name:
            raise ValueError("no way to encode this")
        return super().aggregate(x, state, at, out)


def on_a_lane(compressor: Compressor, transport: Any) -> list[Work[Any]]:
    """Three buckets, handed to a communication thread one by one; the last takes the report along."""
    comm_thread = CommThread([torch.device("cpu")])
    cargo = [bucket({f"{number}": (10, 12)}) for number in range(3)]
    round_ = StepReduction(compressor, transport, list("012"), AggregationContext(), 1.0, 1.0)
    tickets: list[Work[Any]] = [comm_thread.submit(partial(round_.exchange, each, NO_INPUT, 1.0)) for each in cargo[:2]]
    tickets.append(comm_thread.submit(partial(round_.close, cargo[2], NO_INPUT, 1.0, closing())))
    comm_thread.close()
    return tickets


def test_a_bucket_s_answer_that_never_comes_fails_whoever_waits_for_it_and_all_that_follow() -> None:
    transport = Breaking(last=0)
    first, second, last = on_a_lane(PowerSGD(rank=2), transport)
    first.wait()
    for ticket in (second, last):
        with pytest.raises(PeerLost, match="nobody answered word 0"):
            ticket.wait()
    assert len(transport.begun) == 2, "nothing is begun after a failure"


def test_a_bucket_that_cannot_be_encoded_fails_while_another_is_under_way() -> None:
    transport = Breaking(last=-1)
    first, second, last = on_a_lane(Refusing(rank=2), transport)
    first.wait()
    for ticket in (second, last):
        with pytest.raises(ValueError, match="no way to encode this"):
            ticket.wait()
    assert len(transport.begun) == 1


def test_where_nothing_fails_the_last_one_brings_the_verdict() -> None:
    transport = Breaking(last=-1)
    *_, last = on_a_lane(PowerSGD(rank=2), transport)
    assert last.wait().active == (0,)
    assert len(transport.begun) == 6


def test_a_rank_that_fails_between_two_buckets_is_missed_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    small_buckets(monkeypatch)
    failed: list[int] = []

    def work(worker: Worker) -> None:
        model = network(worker.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker.attach(model, optimizer, "PowerSGD(rank=2)")
        if worker.rank == 1:

            def fail(gradient: Tensor) -> None:
                raise KeyError("a user's own hook")

            model.get_parameter("2.bias").register_hook(fail)
        inputs, targets = batch(0, worker.rank)
        try:
            mse_loss(model(inputs), targets).backward()
        except PeerLost:
            failed.append(worker.rank)
            raise

    with pytest.raises(KeyError, match="own hook"):
        cluster(work, 3)
    assert sorted(failed) == [0, 2]
