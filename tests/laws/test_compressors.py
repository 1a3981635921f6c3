"""Laws of compressors: every compressor obeys them, and every law catches its broken twins."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from inspect import isabstract

import pytest
import torch
from laws import differences
from laws.formulas import low_rank_elements, projected_elements, ring, sizes, sparse
from laws.laws import (
    LAYOUT,
    WORLDS,
    Group,
    check_bytes,
    check_conservation,
    check_in_place,
    check_own,
    check_refuses_to_send_nonsense,
    check_untouched,
    check_zeros,
)
from laws.subjects import CONTAINED, EVERY, EXACT, FAMILIES, ROUNDED, each_compressor
from support.nightly import nightly, once_each
from torch import Tensor

from gossamer.algorithms import compressors
from gossamer.algorithms.compressors import (
    Compressor,
    Dense,
    Feedback,
    PowerSGD,
    RandomProjection,
    Route,
    SharedMask,
    TopK,
)
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import Residual
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import AllGather, Payload


def conserves(compressor: Compressor) -> bool:
    return ("Feedback" in repr(compressor) and compressor not in differences.EXACT) or compressor == Dense()


def test_every_compressor_is_here() -> None:
    public = {name for name in compressors.__all__ if not isabstract(getattr(compressors, name))}
    inside = {type(c).__name__ for c in EVERY}
    assert public <= inside, f"no law is checked for {public - inside}"


@once_each("compressor, world", EXACT, WORLDS, not_by_day=CONTAINED)
def test_own(compressor: Compressor, world: int) -> None:
    check_own(compressor, world)


@pytest.mark.parametrize("compressor", ROUNDED, ids=repr)
def test_own_of_half_precision_is_right_to_half_a_unit(compressor: Compressor) -> None:
    check_own(compressor, 4, tolerance=2**-8)


@once_each("compressor, world", filter(conserves, EXACT), WORLDS, not_by_day=CONTAINED)
def test_conservation(compressor: Compressor, world: int) -> None:
    (decay,) = {term.decay for term in compressor.held() if isinstance(term, Feedback)} or {1.0}
    check_conservation(compressor, world, decay=decay)


@each_compressor
def test_zeros_and_dead_layers(compressor: Compressor) -> None:
    check_zeros(compressor, 3)


@each_compressor
def test_nonsense_is_not_sent(compressor: Compressor) -> None:
    check_refuses_to_send_nonsense(compressor)


@each_compressor
def test_nothing_is_written_before_the_commit(compressor: Compressor) -> None:
    check_untouched(compressor)


@each_compressor
def test_in_place(compressor: Compressor) -> None:
    check_in_place(compressor, 3)


def check_resumes(compressor: Compressor, keep: Callable[[State], State]) -> None:
    """Its state, its inputs and its context are all that an aggregation reads."""
    whole, resumed = Group(compressor, 3), Group(compressor, 3)
    for _ in range(2):
        whole.aggregate(whole.gradients())
    resumed.step, resumed.states = whole.step, [keep(state) for state in whole.states]
    for _ in range(2):
        gradients = whole.gradients()
        assert torch.equal(resumed.aggregate(gradients)[0].mean, whole.aggregate(gradients)[0].mean)


def copied(state: State) -> State:
    return State({key: packed.clone() for key, packed in state.items()})


@each_compressor
def test_a_resumed_group_has_the_same_bits(compressor: Compressor) -> None:
    check_resumes(compressor, copied)


@pytest.mark.parametrize("compressor", [Feedback(TopK(density=0.1)), SharedMask(density=0.1)], ids=repr)
def test_resuming_catches_a_state_that_is_lost(compressor: Compressor) -> None:
    blank = Group(compressor, 3).states[0]
    with pytest.raises(AssertionError):
        check_resumes(compressor, lambda state: copied(blank))


@each_compressor
def test_it_works_where_its_input_lies_regardless_of_the_default_device(compressor: Compressor) -> None:
    here = Group(compressor, 2, dtype=torch.float32)
    gradients = here.gradients()
    wanted = here.aggregate(gradients)[0].mean
    with torch.device("meta"):
        found = Group(compressor, 2, dtype=torch.float32).aggregate(gradients)[0].mean
    assert torch.equal(found, wanted)


@each_compressor
def test_repr_rebuilds(compressor: Compressor) -> None:
    names = {name: getattr(compressors, name) for name in compressors.__all__}
    assert eval(repr(compressor), names) == compressor


FORMULAS: list[tuple[Compressor, Callable[[int], float]]] = [
    (Dense(), lambda n: ring(n, 4 * sum(sizes()))),
    (Dense(dtype="bfloat16"), lambda n: ring(n, 2 * sum(sizes()))),
    (TopK(density=0.1), lambda n: (n - 1) * sparse(sizes())),
    (Int8(block=16), lambda n: (n - 1) * sum(size + 4 * math.ceil(size / 16) for size in sizes())),
    (Feedback(Int8(block=16)), lambda n: (n - 1) * sum(size + 4 * math.ceil(size / 16) for size in sizes())),
    (PowerSGD(rank=2), lambda n: ring(n, 4 * low_rank_elements(2))),
    (RandomProjection(rank=2), lambda n: ring(n, 4 * projected_elements(2))),
    (Feedback(RandomProjection(rank=2)), lambda n: ring(n, 4 * projected_elements(2))),
    (
        Route(Feedback(TopK(density=0.1))),
        lambda n: (n - 1) * sparse([270, 528]) + ring(n, 4 * (240 + 20 + 48 + 1)),
    ),
]
for family in FAMILIES:
    FORMULAS += family.FORMULAS


@pytest.mark.parametrize("world", [3, 8, *nightly(2, 4, 5)])
@pytest.mark.parametrize(
    ("compressor", "formula"), FORMULAS, ids=lambda value: repr(value)[:40] * isinstance(value, Compressor) or "formula"
)
def test_bytes(compressor: Compressor, formula: Callable[[int], float], world: int) -> None:
    check_bytes(compressor, world, formula)


@pytest.mark.parametrize("world", [2, 3, 4, 5, 7, 8])
def test_integers_are_exact(world: int) -> None:
    group = Group(Dense(), world, dtype=torch.float32)
    whole = [torch.randint(-1000, 1000, (LAYOUT.numel,)).float() * world for _ in range(world)]
    exact = torch.stack(whole).double().mean(0)
    for staged in group.aggregate(whole):
        assert torch.equal(staged.mean.double(), exact)


# -- the broken twins ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Wrapping(Compressor):
    """A twin changes one thing about an aggregation that is right."""

    inner: Compressor

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        return self.inner.init(like, at)

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        staged = yield from self.inner.aggregate(x, state, at, out)
        return self.broken(staged, x, state, at)

    def broken(
        self, staged: AggregationResult, x: FlatTensors, state: State, at: AggregationContext
    ) -> AggregationResult:
        raise NotImplementedError


class WrongSign(Wrapping):
    def broken(
        self, staged: AggregationResult, x: FlatTensors, state: State, at: AggregationContext
    ) -> AggregationResult:
        return replace(staged, own_contribution=lambda: -staged.own)


class MissingDivision(Wrapping):
    def broken(
        self, staged: AggregationResult, x: FlatTensors, state: State, at: AggregationContext
    ) -> AggregationResult:
        return replace(staged, mean=staged.mean * at.world)


class StaleResidual(Wrapping):
    def broken(
        self, staged: AggregationResult, x: FlatTensors, state: State, at: AggregationContext
    ) -> AggregationResult:
        return replace(staged, next_state=State({**staged.next_state, RESIDUAL: state[RESIDUAL]}))


class GlobalResidual(Wrapping):
    """Drops the old residual, as the recursion printed with 1-bit SGD does."""

    def broken(
        self, staged: AggregationResult, x: FlatTensors, state: State, at: AggregationContext
    ) -> AggregationResult:
        return replace(staged, next_state=State({RESIDUAL: FlatTensors(x.flat - staged.own, x.layout)}))


class EagerState(Wrapping):
    def broken(
        self, staged: AggregationResult, x: FlatTensors, state: State, at: AggregationContext
    ) -> AggregationResult:
        for key, packed in staged.next_state.items():
            state[key].flat.copy_(packed.flat)
        return staged


class DifferentBits(Wrapping):
    def broken(
        self, staged: AggregationResult, x: FlatTensors, state: State, at: AggregationContext
    ) -> AggregationResult:
        return replace(staged, mean=staged.mean + at.rank * 1e-12)


class UnguardedScale(Int8):
    """Divides by the scale of a block of zeros."""

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        scale = x.flat.abs().amax().float().view(1) / 127
        return scale, x.flat / scale

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        out.copy_(sum(codes * scales[0] for scales, codes in payloads) / divisor)


class Unpacked(TopK):
    """Claims to be sparse and sends a byte for every entry beside it."""

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        return (*super().encode(x, at, residual), torch.zeros(x.layout.numel, dtype=torch.uint8, device=x.flat.device))

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        super().decode([payload[:2] for payload in payloads], layout, out, divisor)


@pytest.mark.parametrize(
    "twin", [WrongSign(TopK(density=0.1)), MissingDivision(Int8()), DifferentBits(Dense())], ids=repr
)
def test_own_catches(twin: Compressor) -> None:
    with pytest.raises(AssertionError):
        check_own(twin, 4)


@pytest.mark.parametrize(
    "twin",
    [
        TopK(density=0.1),
        Int8(),
        PowerSGD(rank=2),
        StaleResidual(Feedback(TopK(density=0.1))),
        GlobalResidual(Feedback(TopK(density=0.1))),
        Feedback(WrongSign(TopK(density=0.1))),
        Feedback(MissingDivision(TopK(density=0.1))),
    ],
    ids=repr,
)
def test_conservation_catches(twin: Compressor) -> None:
    with pytest.raises(AssertionError):
        check_conservation(twin, 4)


def test_zeros_catches() -> None:
    with pytest.raises(AssertionError):
        check_zeros(UnguardedScale(), 3)


def test_untouched_catches() -> None:
    with pytest.raises(AssertionError, match="before the commit"):
        check_untouched(EagerState(Feedback(TopK(density=0.1))))


def test_bytes_catches() -> None:
    with pytest.raises(AssertionError, match="formula"):
        check_bytes(Unpacked(density=0.1), 4, FORMULAS[2][1])


def test_every_hyperparameter_is_frozen() -> None:
    for compressor in EVERY:
        assert is_dataclass(compressor)
        for field in fields(compressor):
            with pytest.raises(AttributeError):
                setattr(compressor, field.name, None)


def test_gather_is_the_only_word_of_a_codec() -> None:
    x = FlatTensors.zeros(LAYOUT, dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(next(TopK(density=0.1).aggregate(x, {}, AggregationContext(world=2))), AllGather)
