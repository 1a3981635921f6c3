"""Deep gradient compression: momentum correction, masking, warm-up stages, and bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from laws.formulas import ring
from laws.laws import LAYOUT, Group, close
from support.aggregations import aggregate, priced, priced_bytes
from torch import Tensor

from gossamer.algorithms.compressors import DGC, Compressor, OneBitAdam, Route
from gossamer.algorithms.compressors.dgc import MOMENTUM
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.base import rng
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import coded_bytes
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import AllReduceMean
from gossamer.base.runner import simulate
from gossamer.errors import NotFinite

SIZES = LAYOUT.sizes


class Accelerated(Group):
    """A group whose optimizer has momentum."""

    momentum, nesterov = 0.9, False

    def at(self, rank: int) -> AggregationContext:
        return replace(super().at(rank), momentum=self.momentum, nesterov=self.nesterov)


class Nesterov(Accelerated):
    nesterov = True


def total(group: Group, key: str) -> Tensor:
    return torch.stack([state[key].flat for state in group.states]).mean(0)


def check_everything_offered_is_sent_or_waits(compressor: Compressor, kind: type[Accelerated], steps: int = 8) -> None:
    """sum of what was sent + v = sum of u' (Nesterov: g + mu u'), u' = mu u + g with u as it was remembered."""
    group = kind(compressor, 3)
    sent = torch.zeros(LAYOUT.numel, dtype=torch.float64)
    offered = torch.zeros_like(sent)
    for _ in range(steps):
        gradients = group.gradients()
        fresh, before = torch.stack(gradients).mean(0), total(group, MOMENTUM)
        now = 0.9 * before + fresh
        offered += fresh + 0.9 * now if kind.nesterov else now
        sent += group.aggregate(gradients)[0].mean
    close(sent + total(group, RESIDUAL), offered, 1e-10)


EVERY = [
    DGC(density=0.05),
    DGC(density=0.05, then=Int8(block=16)),
    DGC(density=0.05, masking=False),
    DGC(density=0.01, warmup=6),
    DGC(density=1.0),
    DGC(density=0.7),
]


@pytest.mark.parametrize("kind", [Accelerated, Nesterov])
@pytest.mark.parametrize("compressor", EVERY, ids=repr)
def test_everything_offered_is_sent_or_waits(compressor: Compressor, kind: type[Accelerated]) -> None:
    check_everything_offered_is_sent_or_waits(compressor, kind)


@dataclass(frozen=True, repr=False)
class Plain(DGC):
    """A twin that sends gradients without momentum."""

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        return super().aggregate(x, state, replace(at, momentum=0.0), out)


@dataclass(frozen=True, repr=False)
class Forgetful(DGC):
    """A twin that drops what it did not send."""

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        staged: AggregationResult = yield from super().aggregate(x, state, at, out)
        staged.next_state[RESIDUAL].flat.zero_()
        return staged


@pytest.mark.parametrize("twin", [Plain(density=0.05), Forgetful(density=0.05)])
def test_the_law_catches_missing_momentum_and_lost_entries(twin: Compressor) -> None:
    with pytest.raises(AssertionError):
        check_everything_offered_is_sent_or_waits(twin, Accelerated)


def one_step(
    compressor: DGC, world: int = 2, steps: int = 3
) -> tuple[Accelerated, list[State], list[Tensor], AggregationResult]:
    """(group, states before, gradients, rank 0's answer) of the last of a few steps."""
    group = Accelerated(compressor, world)
    for _ in range(steps):
        before, gradients = group.states, group.gradients()
        kept = [State({key: packed.clone() for key, packed in state.items()}) for state in before]
        staged = group.aggregate(gradients)
    return group, kept, gradients, staged[0]


@pytest.mark.parametrize("masking", [True, False])
def test_the_largest_of_what_waits_are_sent_and_begin_again(masking: bool) -> None:
    group, before, gradients, staged = one_step(DGC(density=0.1, masking=masking))
    accelerated = 0.9 * before[0][MOMENTUM].flat + gradients[0]
    waiting = before[0][RESIDUAL].flat + accelerated
    own = staged.own
    for slot in LAYOUT:
        k = max(1, round(0.1 * slot.numel))
        largest = slot.flat_view(waiting).abs().topk(k).indices
        sent = torch.zeros(slot.numel, dtype=torch.bool)
        sent[largest] = True
        for what, there in ((own, False), (group.states[0][RESIDUAL].flat, True)):
            expected = torch.where(sent ^ there, slot.flat_view(waiting), 0.0)
            close(slot.flat_view(what), expected, 1e-14)
        masked = torch.where(sent & masking, 0.0, slot.flat_view(accelerated))
        close(slot.flat_view(group.states[0][MOMENTUM].flat), masked, 1e-14)


def test_by_hand() -> None:
    """Two entries, one of them sent a step: mu = 1/2, numbers that are exact."""
    layout = Layout.of({"pair": (1, 2)})
    state = DGC(density=0.5).init(
        FlatTensors.zeros(layout, dtype=torch.float32, device=torch.device("cpu")), AggregationContext(world=2)
    )
    seen: list[list[list[float]]] = []
    for step in range(3):
        at = AggregationContext(step=step, world=2, momentum=0.5)
        scripts = [
            DGC(density=0.5).aggregate(FlatTensors(torch.tensor([4.0, 3.0]), layout), state, at) for _ in range(2)
        ]
        staged, other = simulate(scripts)
        assert torch.equal(staged.mean, other.mean)
        state = staged.next_state.after(state)
        seen.append([staged.mean.tolist(), state[MOMENTUM].flat.tolist(), state[RESIDUAL].flat.tolist()])
    assert seen == [
        [[4.0, 0.0], [0.0, 3.0], [0.0, 3.0]],
        [[0.0, 7.5], [4.0, 0.0], [4.0, 0.0]],
        [[10.0, 0.0], [0.0, 3.0], [0.0, 3.0]],
    ]


def test_nesterov_by_hand() -> None:
    layout = Layout.of({"one": (1, 1)})
    compressor = DGC(density=1.0, masking=False)
    state = compressor.init(
        FlatTensors.zeros(layout, dtype=torch.float32, device=torch.device("cpu")), AggregationContext(world=2)
    )
    sent: list[float] = []
    for _ in range(3):
        at = AggregationContext(world=2, momentum=0.5, nesterov=True)
        x = FlatTensors(torch.tensor([2.0]), layout)
        staged = simulate([compressor.aggregate(x, state, at) for _ in range(2)])[0]
        state = staged.next_state.after(state)
        sent.append(float(staged.mean))
    assert sent == [3.0, 3.5, 3.75]


def test_masking_leaves_the_others_their_momentum_where_everything_travels() -> None:
    """Eight workers send all of a quarter's density; the momentum is as if they had not."""
    few, _, _, answer = one_step(DGC(density=0.25), world=2, steps=1)
    every, _, _, whole = one_step(DGC(density=0.25), world=8, steps=1)
    assert answer.own.count_nonzero() == sum(max(1, round(0.25 * size)) for size in SIZES)
    assert whole.own.count_nonzero() == LAYOUT.numel
    assert every.states[0][RESIDUAL].flat.count_nonzero() == 0
    assert torch.equal(every.states[0][MOMENTUM].flat, few.states[0][MOMENTUM].flat)
    assert few.states[0][MOMENTUM].flat.count_nonzero() > 0


def bytes_of(compressor: Compressor, world: int, step: int, numel: int = 4096) -> float:
    return priced_bytes(compressor, world, Layout.of({"matrix": (64, numel // 64)}), step)


@pytest.mark.parametrize("world", [2, 4])
def test_density_falls_in_five_stages(world: int) -> None:
    compressor = DGC(density=0.001, warmup=40)
    for step, density in [(0, 0.25), (10, 0.0625), (20, 0.015625), (30, 0.00390625), (40, 0.001), (400, 0.001)]:
        k = round(density * 4096)
        expected = min((world - 1) * (4 * k + coded_bytes(k, 4096)), ring(world, 4 * 4096))
        assert bytes_of(compressor, world, step) == expected


def ops(compressor: Compressor, world: int) -> list[str]:
    return [op.op for op in priced(compressor, world, LAYOUT)]


def test_everything_travels_where_it_is_cheaper() -> None:
    assert ops(DGC(density=0.25), 4) == ["Gather"]
    assert ops(DGC(density=0.25), 8) == ["Mean"]
    assert ops(DGC(density=1.0), 2) == ["Mean"]
    for world in (2, 3, 4, 5, 8, 64):
        for density in (0.001, 0.03, 0.2, 0.5, 1.0):
            assert bytes_of(DGC(density=density), world, 0) <= ring(world, 4 * 4096)


# -- clipping ---------------------------------------------------------------------------------------------------------


def offered(compressor: DGC, x: Tensor, world: int = 4) -> Tensor:
    """What one worker, fresh, would send of x, without momentum and with a density that sends all."""
    at = AggregationContext(world=world)
    script = compressor.aggregate(FlatTensors(x, LAYOUT), compressor.init(FlatTensors(x, LAYOUT), at), at)
    op = next(script)
    assert isinstance(op, AllReduceMean)
    return op.tensor


def test_clipping_bounds_the_norm_of_every_tensor() -> None:
    x = Group(DGC(), 2).gradients()[0]
    limit = 0.5 * math.sqrt(4)
    sent = offered(DGC(density=1.0, clip=0.5), x)
    for slot in LAYOUT:
        before, after = slot.flat_view(x), slot.flat_view(sent)
        expected = before * min(1.0, limit / float(before.norm()))
        close(after, expected, 1e-14)
    assert any(float(slot.flat_view(x).norm()) > limit for slot in LAYOUT)


@pytest.mark.parametrize("compressor", [DGC(density=1.0, clip=0.5), OneBitAdam(warmup=1, clip=0.5)], ids=repr)
@pytest.mark.parametrize("world", [2, 4, 16, 64])
def test_the_mean_that_is_applied_does_not_shrink_with_the_workers(compressor: Compressor, world: int) -> None:
    """Independent gradients, far above the limit: their mean has the norm that it would be clipped to, for any number
    of workers. Equal ones are not independent, and their mean is longer by sqrt(n), which is what the limit allows."""
    layout = Layout.of({"a": (4000,), "b": (2000,)})
    noise = [100 * torch.randn(6000, generator=rng.generator("clip", rank)) for rank in range(world)]
    states = [
        compressor.init(FlatTensors(x, layout), AggregationContext(rank=rank, world=world))
        for rank, x in enumerate(noise)
    ]
    for inputs, expected in ((noise, 0.5), ([noise[0]] * world, 0.5 * math.sqrt(world))):
        mean = FlatTensors(aggregate(compressor, inputs, layout, states)[0].mean, layout)
        for slot in layout:
            assert float(slot.flat_view(mean.flat).norm()) == pytest.approx(expected, rel=0.06)


def test_what_is_small_is_not_touched_by_clipping() -> None:
    x = Group(DGC(), 2, dtype=torch.float32).gradients()[0]
    assert torch.equal(offered(DGC(density=1.0, clip=1e6), x), x)
    assert torch.equal(offered(DGC(density=1.0, clip=1.0), torch.zeros_like(x)), torch.zeros_like(x))


def test_clipping_bounds_numbers_whose_squares_overflow() -> None:
    sent = offered(DGC(density=1.0, clip=2.0), torch.full((LAYOUT.numel,), 1e30))
    for slot in LAYOUT:
        assert float(slot.flat_view(sent).norm()) == pytest.approx(4.0, rel=1e-5)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_clipping_does_not_hide_what_is_not_finite(number: float) -> None:
    x = Group(DGC(), 2, dtype=torch.float32).gradients()[0]
    x[7] = number
    for density in (0.01, 1.0):
        with pytest.raises(NotFinite):
            offered(DGC(density=density, clip=1.0), x)


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.1, 1.0])
def test_half_precision_gradients_are_remembered_in_single(density: float) -> None:
    group = Accelerated(DGC(density=density), 2, dtype=torch.float16)
    x = torch.full((LAYOUT.numel,), 60_000.0, dtype=torch.float16)
    for finite in (True, False):  # momentum makes the second one too large for float16
        states = group.states
        assert {packed.flat.dtype for state in states for packed in state.values()} == {torch.float32}
        compressor, outs = DGC(density=density, masking=False), [torch.empty_like(x) for _ in states]
        staged = aggregate(compressor, [x.clone() for _ in states], LAYOUT, states, outs, group.at)
        assert [each.finite for each in staged] == [finite, finite]
        group.states = [each.next_state.after(old) for each, old in zip(staged, states, strict=True)]
        group.step += 1


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"density": 0.0}, "density must be the fraction"),
        ({"density": 1.5}, "density must be the fraction"),
        ({"warmup": -1}, "warmup must be a number of steps"),
        ({"clip": 0.0}, r"clip must be the largest norm of a tensor\'s mean gradient.* Write DGC\(clip=1.0\)"),
    ],
)
def test_refusals(arguments: dict[str, float], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        DGC(**arguments)  # type: ignore[arg-type]


def test_only_what_it_compresses_is_owned() -> None:
    route = Route(DGC())
    owned = [slot.name for slot in LAYOUT if route.owns_momentum(slot) is not None]
    assert owned == [slot.name for slot in LAYOUT if route.group(slot) == 0] == ["kernel", "wide"]
