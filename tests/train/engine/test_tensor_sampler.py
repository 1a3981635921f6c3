"""Tensor sampler: what it tells is what a second computation of every rank's own finds, exactly where that is exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import sqrt
from typing import Any

import pytest
import torch
from support.nightly import nightly
from support.virtual_workers import Worker, cluster, loss_of, network
from torch import Tensor

from gossamer import events
from gossamer.algorithms.compressors import Compressor, Dense, Feedback, PowerSGD, TopK
from gossamer.algorithms.compressors.route import Route
from gossamer.base.aggregation import AggregationContext, AggregationResult
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.runner import simulate
from gossamer.events import TensorCost, TensorsMeasured
from gossamer.train.engine import bucket_reduction, tensor_sampler
from gossamer.train.engine.bucket import assign_buckets
from gossamer.train.engine.tensor_sampler import TensorSampler, apportioned

SHAPES = {"first.weight": (6, 8), "first.bias": (6,), "second.weight": (4, 6)}
LAYOUT = Layout.of(SHAPES)


@contextmanager
def sampled() -> Iterator[list[TensorsMeasured]]:
    """What is told within the block, by any worker."""
    found: list[TensorsMeasured] = []
    end = events.subscribe(
        lambda event: found.append(event) if isinstance(event, TensorsMeasured) else None, takes_samples=True
    )
    try:
        yield found
    finally:
        end()


def whole_numbers(step: int, rank: int = 0) -> Tensor:
    """Distinct magnitudes, so that the largest are the same by every rule."""
    order = torch.randperm(LAYOUT.numel, generator=torch.Generator().manual_seed(10 * step + rank))
    return (order + 1.0) * torch.where(order % 2 == 0, 1.0, -1.0)


def aggregated(compressor: Compressor, steps: int, world: int = 2) -> Iterator[tuple[FlatTensors, AggregationResult]]:
    """Rank 0's inputs and results."""
    at = [AggregationContext(rank=rank, world=world) for rank in range(world)]
    like = FlatTensors(torch.zeros(LAYOUT.numel), LAYOUT)
    states = [compressor.init(like, each) for each in at]
    for step in range(steps):
        given = [FlatTensors(whole_numbers(step, rank), LAYOUT) for rank in range(world)]
        results = simulate(
            [compressor.aggregate(x, state, each) for x, state, each in zip(given, states, at, strict=True)]
        )
        yield given[0], results[0]
        states = [result.next_state.after(state) for result, state in zip(results, states, strict=True)]


def told_of(compressor: Compressor, x: FlatTensors, result: AggregationResult, nbytes: float = 0.0) -> Any:
    with sampled() as found:
        TensorSampler(lambda: 7).measure(compressor, x, result, nbytes, AggregationContext(world=2))
    (event,) = found
    assert event.step == 7
    return {each.name: each for each in event.tensors}


# -- energies ----------------------------------------------------------------------------------------------------------


def check_largest(shift: float = 0.0) -> None:
    """TopK under feedback, by sorting: each tensor's wanted numbers are its gradient and what it kept, and all but the
    largest wait. shift: added to what is kept, a planted fault."""
    compressor, kept = Feedback(TopK(density=0.25)), torch.zeros(LAYOUT.numel)
    for x, result in aggregated(compressor, steps=4):
        told = told_of(compressor, x, result)
        wanted, kept = kept + x.flat, torch.zeros(LAYOUT.numel)
        own = result.own
        for slot in LAYOUT:
            each, sent = slot.flat_view(wanted), slot.flat_view(own) != 0
            slot.flat_view(kept).copy_(each.masked_fill(sent, 0.0))
            left, whole = slot.flat_view(kept).double().square().sum(), each.double().square().sum()
            assert told[slot.name].energy_share == float(1 - left / whole) + shift
            assert told[slot.name].residual_norm == sqrt(float(left))
            assert told[slot.name].gradient_norm == sqrt(float(slot.flat_view(x.flat).double().square().sum()))


def test_the_share_that_goes_at_once_is_exact_for_whole_numbers() -> None:
    check_largest()


def test_the_check_notices_another_share() -> None:
    with pytest.raises(AssertionError):
        check_largest(shift=1e-12)


def test_without_compression_all_goes_and_nothing_waits() -> None:
    for x, result in aggregated(Dense(), steps=2):
        for each in told_of(Dense(), x, result).values():
            assert (each.energy_share, each.residual_norm) == (1.0, 0.0)


def test_what_is_lost_for_good_is_not_said_to_wait() -> None:
    for x, result in aggregated(TopK(density=0.25), steps=2):
        for each in told_of(TopK(density=0.25), x, result).values():
            assert each.residual_norm == 0.0
            assert 0.25 < each.energy_share < 1


@pytest.mark.parametrize("inner", [TopK(density=0.25), Route(PowerSGD(rank=2), smallest=0)])
def test_differences_wait_until_the_others_know_them(inner: Compressor) -> None:
    compressor = Feedback(inner, rule="ef21")
    for x, result in aggregated(compressor, steps=3):
        told = told_of(compressor, x, result)
        for slot in LAYOUT:
            waits = (slot.flat_view(x.flat) - slot.flat_view(result.own)).double().norm()
            assert told[slot.name].residual_norm == pytest.approx(float(waits), rel=1e-5, abs=1e-5)


def test_low_rank_shares_are_those_of_its_residual() -> None:
    compressor, kept = Route(Feedback(PowerSGD(rank=2)), smallest=0), torch.zeros(LAYOUT.numel)
    for x, result in aggregated(compressor, steps=3):
        told = told_of(compressor, x, result)
        wanted = kept + x.flat
        kept = wanted - result.own
        for slot in LAYOUT:
            left, whole = slot.flat_view(kept).double().norm(), slot.flat_view(wanted).double().norm()
            assert told[slot.name].energy_share == pytest.approx(1 - float(left / whole) ** 2, abs=1e-4)


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", [Dense(), TopK(density=0.25), Route(Feedback(TopK(density=0.1)), smallest=10)])
def test_bytes_of_all_tensors_are_those_of_their_bucket(compressor: Compressor) -> None:
    ((x, result),) = aggregated(compressor, steps=1)
    told = told_of(compressor, x, result, nbytes=1000.0)
    assert sum(each.bytes for each in told.values()) == pytest.approx(1000.0)


def test_bytes_go_to_those_that_send_them() -> None:
    """A bias that is sent as it is costs more than its share of the numbers."""
    compressor = Route(Feedback(TopK(density=0.125)), smallest=10)
    ((x, result),) = aggregated(compressor, steps=1)
    told = told_of(compressor, x, result, nbytes=1000.0)
    per_number = {name: each.bytes / each.numel for name, each in told.items()}
    assert per_number["first.bias"] > 1.5 * per_number["first.weight"]
    assert apportioned(12.0, [0.0, 0.0], [1, 2]) == [4.0, 8.0]


# -- turns -------------------------------------------------------------------------------------------------------------


def test_buckets_take_turns() -> None:
    """One a step is measured: every bucket before any for the second time, also when others come in their place."""
    now, taken = [0.0], []
    sampler = TensorSampler(lambda: 1, lambda: now[0])
    with sampled():
        for step in range(24):
            for name in ["a", "b", "c"] if step < 12 else ["c", "d"]:
                if sampler.takes(Layout.of({name: (1,)})):
                    taken.append(name)
                    sampler.due = now[0] + 1.0
            now[0] += 1.0
    assert taken[:4] == ["a", "b", "c", "a"]
    assert set(taken[-4:]) == {"c", "d"}


def test_nobody_pays_where_nobody_takes_samples() -> None:
    sampler = TensorSampler(lambda: 1)
    end = events.subscribe(lambda event: None)
    assert not sampler.takes(LAYOUT)
    end()
    with sampled():
        assert sampler.takes(LAYOUT)
    assert not sampler.takes(LAYOUT)


def test_measuring_takes_half_a_hundredth_of_the_time_at_most() -> None:
    now, taken = [0.0], 0

    def slow() -> float:
        now[0] += 0.25  # a look at the clock takes that long
        return now[0]

    sampler = TensorSampler(lambda: 1, slow)
    ((x, result),) = aggregated(Dense(), steps=1)
    with sampled() as found:
        while now[0] < 1000.0:
            if sampler.takes(LAYOUT):
                sampler.measure(Dense(), x, result, 0.0, AggregationContext(world=2))
                taken += 1
    assert len(found) == taken
    assert taken * 0.25 <= 1000.0 * tensor_sampler.SAMPLE_SHARE + 2 * 0.25  # and the first, and one begun


def test_an_error_of_the_measure_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise ValueError("planted")

    monkeypatch.setattr(tensor_sampler, "_energies", broken)
    with sampled() as found:
        trained("TopK(0.2)", 3)
    assert found == []


# -- whole sessions ----------------------------------------------------------------------------------------------------


def trained(recipe: str, steps: int) -> Tensor:
    def work(worker: Worker) -> Tensor:
        model = network(worker.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        worker.attach(model, optimizer, recipe)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model, step, worker.rank).backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    return cluster(work, 2)[0]  # type: ignore[no-any-return]


RECIPES = [
    "Dense()",
    "TopK(0.2)",
    "Feedback(TopK(0.2), rule='ef21')",
    "DGC(density=0.1)",
    "PowerSGD(rank=2)",
    "QSGD(4)",
    "OneBit()",
    "Sharded(Int8())",
    "EveryStep(delay=1) + TopK(0.2)",
    "LocalSGD(2) + TopK(0.2)",
    "DiLoCo(2) + Int8()",
    "DiLoCo(4, fragments=2, delay=1) + PowerSGD(rank=2)",
    "DelayedAveraging(2)",
]


@pytest.mark.parametrize("recipe", [*RECIPES[1::2], *nightly(*RECIPES[::2])])
def test_every_recipe_tells_of_every_tensor_and_trains_to_the_same_bits(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossamer.train.synchronizers.stages.assign_buckets", partial(assign_buckets, bucket_bytes=1))
    monkeypatch.setattr(tensor_sampler, "SAMPLE_SHARE", float("inf"))
    monkeypatch.setattr(tensor_sampler, "SAMPLE_SECONDS", 0.0)
    alone = trained(recipe, 24)
    with sampled() as found:
        watched = trained(recipe, 24)
    assert torch.equal(alone, watched)
    rows: Sequence[TensorCost] = [each for event in found for each in event.tensors]
    assert {each.name for each in rows} == {name for name, _ in network(0).named_parameters()}
    assert all(each.gradient_norm is not None and each.gradient_norm >= 0 for each in rows)
    assert all(each.bytes is not None and each.bytes > 0 for each in rows)
    assert all(each.energy_share is None or each.energy_share <= 1 for each in rows)


def test_the_check_notices_a_measure_that_writes_to_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = TensorSampler.measure

    def spoiling(self: TensorSampler, compressor: Any, x: Any, staged: AggregationResult, *rest: Any) -> None:
        measure(self, compressor, x, staged, *rest)
        staged.mean.mul_(1 + 1e-5)

    monkeypatch.setattr(bucket_reduction.TensorSampler, "measure", spoiling)
    with pytest.raises(AssertionError):
        test_every_recipe_tells_of_every_tensor_and_trains_to_the_same_bits("TopK(0.2)", monkeypatch)


def test_bytes_of_a_bucket_in_a_run_are_those_of_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bucket holds all tensors, so its sum is what Dense() sends of the gradients, without the report."""
    with sampled() as found:
        trained("Dense()", 3)
    numel = sum(parameter.numel() for parameter in network(0).parameters())
    itemsize = next(network(0).parameters()).element_size()
    for event in found:
        assert sum(each.bytes or 0.0 for each in event.tensors) == pytest.approx(numel * itemsize)  # 2 (n-1)/n = 1
