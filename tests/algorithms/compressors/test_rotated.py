"""Rotation: what is sent are coefficients, and everything else stays as it was."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from laws.laws import LAYOUT, Group, check_in_place, check_own, check_untouched, close
from support.aggregations import aggregate
from torch import Tensor

from gossamer.algorithms.compressors import (
    DGC,
    QSGD,
    Compressor,
    Dense,
    Feedback,
    OneBit,
    RandomK,
    Rotated,
    Route,
    Sharded,
    TernGrad,
    TopK,
    point_to_point,
    rotated,
)
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.sharded import settle
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.layout import FlatTensors, Layout
from gossamer.errors import NotFinite

BOTH = [Rotated(Dense()), Rotated(Dense(), by="hadamard")]
VECTOR = Layout.of({"vector": (4096,)})


def draws(n: int, name: object = "", dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=rng.generator("rotated", str(name)), dtype=dtype)


# -- there and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [2, 8, 64])
@pytest.mark.parametrize("rotation", BOTH, ids=repr)
def test_the_way_back_keeps_numbers_and_norms_of_every_tensor(rotation: Rotated, block: int) -> None:
    rotation = replace(rotation, block=block)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 4e-6)):
        x = draws(LAYOUT.numel, dtype=dtype)
        there = rotation.turned(x, LAYOUT)
        close(rotation.turned(there, LAYOUT, inverse=True), x, tolerance)
        for slot in LAYOUT:
            close(slot.flat_view(there).double().norm(), slot.flat_view(x).double().norm(), 4 * tolerance)


def test_cosines_of_kernels_are_those_of_first_by_everything_else() -> None:
    shape = (6, 5, 3, 3)
    x = draws(270, dtype=torch.float64)
    whole = Rotated(Dense()).turned(x, Layout.of({"w": shape}))
    close(whole, Rotated(Dense()).turned(x, Layout.of({"w": (6, 45)})), 1e-12)
    apart = Rotated(Dense()).turned(x, Layout.of({"w": (270,)}))
    assert float((whole - apart).abs().max()) > 0.1


def test_tensors_are_seen_as_they_lie_in_memory() -> None:
    """A transposed matrix has the transposed coefficients; channels_last has its channels side by side."""
    matrix = draws(240, dtype=torch.float64).view(12, 20)
    plain = Rotated(Dense()).turned(matrix.flatten(), Layout.of({"w": matrix})).view(12, 20)
    turned = Layout.of({"w": matrix.T})
    assert turned.by_name["w"].stride == (1, 20)
    close(turned.by_name["w"].view(Rotated(Dense()).turned(matrix.flatten(), turned)), plain.T, 1e-12)
    kernel = draws(240, dtype=torch.float64).view(4, 5, 4, 3).to(memory_format=torch.channels_last)
    flat = kernel.permute(0, 2, 3, 1).flatten()
    close(
        Rotated(Dense()).turned(flat, Layout.of({"w": kernel})),
        Rotated(Dense()).turned(flat, Layout.of({"w": (4, 60)})),
        1e-12,
    )


# -- with everything that can stand inside -----------------------------------------------------------------------------


@pytest.mark.parametrize("rotation", BOTH, ids=repr)
def test_dense_coefficients_are_dense(rotation: Rotated) -> None:
    inputs = [draws(LAYOUT.numel, rank) for rank in range(3)]
    wanted = torch.stack(inputs).double().mean(0)
    for staged in aggregate(rotation, inputs, LAYOUT):
        close(staged.mean, wanted, 4e-6)


def test_integers_are_exact_in_blocks_of_64() -> None:
    """Sums of 64 integers, an eighth of them, a quarter for four workers, and the way back: all fit into 24 bits."""
    layout = Layout.of({"matrix": (16, 12), "vector": (64,)})
    inputs = [torch.randint(-1000, 1000, (256,), generator=rng.generator("whole", rank)).float() for rank in range(4)]
    for staged, x in zip(aggregate(Rotated(Dense(), by="hadamard"), inputs, layout), inputs, strict=True):
        assert torch.equal(staged.mean, torch.stack(inputs).mean(0))
        assert torch.equal(staged.own, x)


@pytest.mark.parametrize("inner", [Feedback(TopK(density=0.1)), Route(Feedback(TopK(density=0.1)))], ids=repr)
@pytest.mark.parametrize("by", ["dct", "hadamard"])
def test_feedback_inside_remembers_coefficients(inner: Compressor, by: str) -> None:
    rotation = Rotated(inner, by=by)
    check_own(rotation, 3)
    check_in_place(rotation, 3)
    check_untouched(rotation)
    group = Group(rotation, 3)
    given, sent = torch.zeros(2, LAYOUT.numel, dtype=torch.float64)
    for _ in range(6):
        gradients = group.gradients()
        given += torch.stack(gradients).mean(0)
        sent += group.aggregate(gradients)[0].mean
    left = torch.zeros_like(given)
    for state in group.states:
        for key, packed in state.items():
            assert key.endswith(RESIDUAL)
            for name, view in packed.items():
                LAYOUT.by_name[name].view(left).add_(view / 3)
    close(sent + rotation.turned(left, LAYOUT, inverse=True), given, 1e-10)
    assert float((sent + left - given).abs().max()) > 0.01


def test_feedback_around_remembers_entries() -> None:
    group = Group(Feedback(Rotated(TopK(density=0.1), block=8)), 2)
    x = group.gradients()
    staged = group.aggregate(x)
    for rank in range(2):
        close(group.states[rank][RESIDUAL].flat, x[rank] - staged[rank].own, 1e-12)
    assert float(group.states[0][RESIDUAL].flat.count_nonzero()) > 0.95 * LAYOUT.numel  # no coefficient is one entry


def test_what_is_inside_knows_that_feedback_is_around() -> None:
    """RandomK does not scale then, or what is left would be as large as what was given."""
    group = Group(Feedback(Rotated(RandomK(density=0.5, feedback=False), by="hadamard")), 2)
    x = group.gradients()
    group.aggregate(x)
    assert float(group.states[0][RESIDUAL].flat.norm()) < 0.9 * float(x[0].norm())


@pytest.mark.parametrize("by", ["dct", "hadamard"])
def test_residuals_that_shards_hand_over_are_entries(by: str) -> None:
    """Before the workers of a group change, errors of the second encoding move into the owners' residuals."""
    group = Group(Feedback(Rotated(Sharded(Int8(block=16)), by=by)), 3)
    x = group.gradients()
    mean = group.aggregate(x)[0].mean
    for rank, state in enumerate(group.states):
        settle(state, AggregationContext(rank=rank, world=3))
    left = torch.stack([state[RESIDUAL].flat for state in group.states]).mean(0)
    close(mean + left, torch.stack(x).mean(0), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("by", ["dct", "hadamard"])
def test_halves_are_turned_in_four_bytes(by: str, dtype: torch.dtype) -> None:
    rotation = Rotated(TopK(density=0.2), by=by)
    inputs = [draws(LAYOUT.numel, rank).to(dtype) for rank in range(2)]
    wide = aggregate(rotation, [x.float() for x in inputs], LAYOUT)
    for narrow, full in zip(aggregate(rotation, inputs, LAYOUT), wide, strict=True):
        assert narrow.mean.dtype == torch.float32
        assert torch.equal(narrow.mean, full.mean)
    over = [x.clone() for x in inputs]
    for staged, out in zip(aggregate(rotation, over, LAYOUT, outs=over), over, strict=True):
        assert staged.mean is out
        assert torch.equal(out, wide[0].mean.to(dtype))
    states = [Feedback(rotation).init(FlatTensors(x, LAYOUT), AggregationContext(world=2)) for x in inputs]
    assert states[0][RESIDUAL].flat.dtype == torch.float32
    found = aggregate(Feedback(rotation), inputs, LAYOUT, states)
    close(found[0].next_state[RESIDUAL].flat, inputs[0].float() - found[0].own, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("inner", [Int8(), Route(TopK(density=0.1)), TernGrad(), Dense()], ids=repr)
@pytest.mark.parametrize("by", ["dct", "hadamard"])
def test_a_message_stands_for_what_its_writer_says(inner: Compressor, by: str, dtype: torch.dtype) -> None:
    rotation, at = Rotated(inner, by=by), AggregationContext(step=2, seed=3, rank=1, world=4)
    assert rotation.decodes_without_input == inner.decodes_without_input
    assert (rotation.decoders(LAYOUT) is None) == (inner == TernGrad())
    x = FlatTensors(draws(LAYOUT.numel).to(dtype), LAYOUT)
    message = point_to_point.encode(rotation, x, point_to_point.begin(rotation, x, at), at)
    out = torch.empty(LAYOUT.numel, dtype=dtype)
    point_to_point.decode(rotation, message.payload, LAYOUT, at, out)
    close(out, message.own().to(dtype), 1e-6)


@pytest.mark.parametrize(
    ("written", "resolved"),
    [
        ("Rotated(TopK(0.01))", Route(Feedback(Rotated(TopK(density=0.01))))),
        ("Rotated(TopK(0.01, feedback=False))", Route(Rotated(TopK(density=0.01, feedback=False)))),
        ("Rotated(QSGD(), by='hadamard')", Route(Rotated(QSGD(), by="hadamard"))),
        ("Feedback(Rotated(Int8()))", Route(Feedback(Rotated(Int8())))),
        ("Rotated(Route(TopK(0.01)))", Route(Rotated(Route(Feedback(TopK(density=0.01)))))),
        ("Rotated(Feedback(Int8()))", Route(Rotated(Feedback(Int8())))),
    ],
)
def test_recipes_feed_back_what_wants_it(written: str, resolved: Compressor) -> None:
    found = resolve(written).compressor
    assert found == resolved
    assert resolve(found).compressor == found


def test_what_applies_momentum_does_not_fit_inside() -> None:
    with pytest.raises(ValueError, match="Rotated, may be around it"):
        resolve(Rotated(DGC()))


def test_a_mean_that_overflows_on_the_way_back_is_reported() -> None:
    class Louder(Dense):
        def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Any:
            staged = yield from super().aggregate(x, state, at, out)
            return replace(staged, mean=staged.mean.fill_(2e38))

    for staged in aggregate(Rotated(Louder(), by="hadamard"), [draws(4096), draws(4096)], VECTOR):
        assert not staged.finite


@pytest.mark.parametrize("rotation", BOTH, ids=repr)
def test_what_overflows_on_its_way_there_is_not_sent(rotation: Rotated) -> None:
    with pytest.raises(NotFinite):
        aggregate(rotation, [torch.full((4096,), 1e38)] * 2, VECTOR)


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"by": "fourier"}, r"got 'fourier'\. Write Rotated\(TernGrad\(\), by='hadamard'\)"),
        ({"block": 1}, "from 2 to 256"),
        ({"block": 512}, "from 2 to 256"),
        ({"by": "hadamard", "block": 48}, "a power of two from 2 to 16384, got 48"),
        ({"by": "hadamard", "block": 1}, "a power of two"),
        ({"by": "hadamard", "block": 2**15}, "a power of two"),
    ],
)
def test_refusals(arguments: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Rotated(Dense(), **arguments)


# -- whether it helps --------------------------------------------------------------------------------------------------


def lost(compressor: Compressor, x: Tensor, seed: int = 0) -> float:
    """|x - C(x)|^2 / |x|^2, of one encoding."""
    packed, at = FlatTensors(x, VECTOR), AggregationContext(seed=seed)
    own = point_to_point.encode(compressor, packed, point_to_point.begin(compressor, packed, at), at).own()
    return float((x - own).double().square().sum() / x.double().square().sum())


def spiky() -> Tensor:
    """Noise, and in every 256 entries one that is a hundred times as large."""
    x = draws(4096, "spiky")
    x[::256] *= 100
    return x


@pytest.mark.parametrize(
    "inner", [TernGrad(), OneBit(block=512), Int8(block=512), Int8(block=512, stochastic=True)], ids=repr
)
def test_spread_spikes_cost_quantizers_less(inner: Compressor) -> None:
    """A z-score: of 20 roundings each, where they are random at all."""
    plain = [lost(inner, spiky(), seed) for seed in range(20)]
    turned = [lost(Rotated(inner, by="hadamard", block=256), spiky(), seed) for seed in range(20)]
    spread = (stdev(plain) ** 2 + stdev(turned) ** 2) ** 0.5 / 20**0.5
    assert fmean(plain) - fmean(turned) > 6 * spread
    assert fmean(turned) < 0.8 * fmean(plain)


def test_a_quantizer_whose_steps_the_norm_sets_gains_nothing() -> None:
    """A rotation leaves the norm as it is, and what is sparse is what few levels of it tell best."""
    plain, turned = (
        fmean(lost(each, spiky(), seed) for seed in range(20))
        for each in (QSGD(levels=7), Rotated(QSGD(levels=7), by="hadamard", block=256))
    )
    assert turned > 2 * plain


def test_without_signs_a_row_of_the_matrix_is_the_worst_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is one row of H: even entries, the best that a quantizer can get, and one spike without signs."""
    row = torch.tensor([(-1.0) ** (37 & place).bit_count() for place in range(64)]).repeat(64)
    rotation = Rotated(OneBit(block=64), by="hadamard")
    assert lost(OneBit(block=64), row) == 0.0
    assert lost(rotation, row) < 0.5
    monkeypatch.setattr(rotated, "_signs", lambda block, dtype, device: torch.ones(block, dtype=dtype))
    assert lost(rotation, row) > 0.9


def test_cosines_gather_what_is_smooth_and_nothing_else() -> None:
    sparse = TopK(density=0.02)
    smooth = torch.cos(torch.arange(4096) / 30.0) + 0.1 * draws(4096)
    assert lost(Rotated(sparse), smooth) < 0.2 * lost(sparse, smooth)
    noise = draws(4096, "noise")
    assert abs(lost(Rotated(sparse), noise) - lost(sparse, noise)) < 0.03


@pytest.mark.parametrize("by", ["dct", "hadamard"])
def test_the_rounding_debt_of_the_inner_compressor_is_owed_in_entries(by: str) -> None:
    """Law of every aggregation: mean over workers of own = mean + sum over workers of owed, after a first step."""
    group = Group(Rotated(Feedback(Sharded(Int8(block=16))), by=by), 3)
    staged = group.aggregate(group.gradients())
    owed = [each.owed for each in staged if each.owed is not None]
    assert len(owed) == 3
    assert any(each.any() for each in owed)
    close(torch.stack([each.own for each in staged]).mean(0), staged[0].mean + torch.stack(owed).sum(0), 1e-5)
