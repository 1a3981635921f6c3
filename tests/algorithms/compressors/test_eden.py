"""EDEN: what its messages stand for, that they are unbiased, and what independent rotations are good for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from support.aggregations import aggregate
from support.nightly import nightly
from torch import Tensor

from gossamer.algorithms.compressors import EDEN
from gossamer.algorithms.compressors.eden import LEVELS, quantized
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import Residual, hadamard
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Payload
from gossamer.errors import MalformedError

LARGE = Layout.of({"x": (4096,)})
ODD = Layout.of({"matrix": (20, 30), "empty": (0,), "one": (1,), "vector": (97,)})
DISTORTIONS = {1: 0.571, 2: 0.133, 4: 0.0096}


def at(step: int = 0, rank: int = 0) -> AggregationContext:
    return AggregationContext(step=step, rank=rank, world=2)


def numbers(layout: Layout, seed: int = 0) -> Tensor:
    return torch.randn(layout.numel, generator=rng.generator("eden", seed), dtype=torch.float64)


def decoded(codec: EDEN, x: Tensor, layout: Layout, here: AggregationContext) -> Tensor:
    return codec.decoded(codec.encode(FlatTensors(x, layout), here), layout, x)


# -- one message -------------------------------------------------------------------------------------------------------


def test_two_entries_in_one_bit_by_hand() -> None:
    """x = (3, 1), signs 1: y = (2.828, 1.414), both levels .7979, S = 10 / 3.385 = 2.954, C(x) = (3.333, 0)."""
    x, signs = torch.tensor([3.0, 1.0], dtype=torch.float64), torch.ones(2)
    y = torch.empty_like(x)
    hadamard(x, [2], 2, signs, y)
    assert y.tolist() == pytest.approx([2.8284, 1.4142], abs=1e-4)
    codes, scales = quantized(y, [2], 1)
    assert codes.tolist() == [1, 1]
    assert scales.tolist() == pytest.approx([2.954], abs=1e-3)
    back = torch.empty_like(x)
    hadamard(scales * torch.full_like(x, LEVELS[1][0]), [2], 2, signs, back, inverse=True)
    assert back.tolist() == pytest.approx([10 / 3, 0])


def test_one_bit_is_drive() -> None:
    """S c = sign(y) |x|^2 / |y|_1."""
    y = numbers(LARGE)
    codes, scales = quantized(y, [4096], 1)
    ours = scales * torch.where(codes == 1, 1.0, -1.0).double() * LEVELS[1][0]
    torch.testing.assert_close(ours, y.sign() * y.square().sum() / y.abs().sum())


@pytest.mark.parametrize("bits", LEVELS)
def test_levels_are_nearest_to_a_normal_variable(bits: int) -> None:
    """Each level is the mean of the draws that it stands for, the condition of Lloyd and Max."""
    z = torch.linspace(0.5 / 2**20, 1 - 0.5 / 2**20, 2**20, dtype=torch.float64)
    z = math.sqrt(2) * torch.special.erfinv(2 * z - 1)
    half = torch.tensor(LEVELS[bits], dtype=torch.float64)
    levels = torch.cat([-half.flip(0), half])
    codes = torch.bucketize(z, (levels[1:] + levels[:-1]) / 2)
    means = torch.stack([z[codes == code].mean() for code in range(2**bits)])
    torch.testing.assert_close(means, levels, atol=2e-4, rtol=0)


@pytest.mark.parametrize("bits", LEVELS)
def test_each_block_of_a_message_keeps_its_energy_along_the_input(bits: int) -> None:
    codec = EDEN(bits=bits, block=64)
    for seed in range(5):
        x = numbers(ODD, seed) ** 3
        found = decoded(codec, x, ODD, at(seed))
        for slot in ODD:
            before, after = slot.flat_view(x), slot.flat_view(found)
            torch.testing.assert_close((before * after).sum(), before.square().sum(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("bits", LEVELS)
def test_a_message_loses_what_the_paper_says(bits: int) -> None:
    x = numbers(LARGE, bits)
    lost = (x - decoded(EDEN(bits=bits), x, LARGE, at())).square().sum() / x.square().sum()
    assert float(lost) == pytest.approx(DISTORTIONS[bits], rel=0.1)


def test_zeros_stay_zeros_next_to_other_blocks() -> None:
    x = torch.cat([torch.zeros(64), torch.ones(64)]).double()
    found = decoded(EDEN(block=64), x, Layout.of({"x": (128,)}), at())
    assert torch.equal(found[:64], torch.zeros(64, dtype=torch.float64))


@pytest.mark.parametrize("aliased", [False, True])
def test_its_loss_is_left_in_a_residual(aliased: bool) -> None:
    x, before = numbers(ODD, 3), numbers(ODD, 4)
    wanted = x + before
    residual = Residual(before, before if aliased else torch.empty_like(x))
    payload = EDEN(bits=2).encode(FlatTensors(x, ODD), at(), residual)
    assert torch.equal(residual.after, wanted - EDEN(bits=2).decoded(payload, ODD, x))


# -- many messages -----------------------------------------------------------------------------------------------------

OUTLIER = torch.cat([torch.linspace(-0.5, 0.5, 63), torch.tensor([-7.0])]).double()
FEW = torch.cat([torch.tensor([3.0, 1.0]), torch.zeros(62)]).double()


def worst_bias(codec: EDEN, x: Tensor, draws: int = 600) -> float:
    """The largest |z| of the mean of what is sent against x, over fresh rotations."""
    layout = Layout.of({"x": (len(x),)})
    found = torch.stack([decoded(codec, x, layout, at(step)) for step in range(draws)])
    return float(((found.mean(0) - x).abs() / (found.std(0) / draws**0.5 + 1e-12)).max())


@pytest.mark.parametrize(("bits", "x"), [(1, OUTLIER), (2, FEW), *nightly((2, OUTLIER), (1, FEW))])
def test_messages_are_right_on_average(bits: int, x: Tensor) -> None:
    assert worst_bias(EDEN(bits=bits, block=64), x) <= 4.5


class Shrinking(EDEN):
    """A negative control with the scale of least error, |y|_1 / d for one bit."""

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        seed, scales, codes = super().encode(x, at, residual)
        return seed, scales * 0.64, codes


def test_the_check_of_means_catches_the_scale_of_least_error() -> None:
    assert worst_bias(Shrinking(block=64), OUTLIER, 300) > 9


class Alike(EDEN):
    """A negative control whose workers all draw the same signs."""

    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        return super().encode(x, AggregationContext(step=at.step, world=at.world), residual)


def error_of_a_mean(codec: EDEN, world: int) -> float:
    """Of equal inputs, over the energy of one."""
    x = numbers(LARGE, 9)
    staged = aggregate(
        codec, [x] * world, LARGE, at=lambda rank: AggregationContext(step=1, rank=rank, world=world, seed=3)
    )
    assert all(torch.equal(each.mean, staged[0].mean) for each in staged)
    return float((staged[0].mean - x).square().sum() / x.square().sum())


def test_the_mean_of_independent_rotations_has_a_share_of_the_error() -> None:
    alone, of_eight = error_of_a_mean(EDEN(), 1), error_of_a_mean(EDEN(), 8)
    assert of_eight == pytest.approx(alone / 8, rel=0.15)
    assert error_of_a_mean(Alike(), 8) == pytest.approx(alone, rel=0.15)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_damaged_payloads_are_refused_before_anything_is_written() -> None:
    codec, out = EDEN(bits=2), numbers(ODD, 5)
    kept = out.clone()
    seed, scales, codes = codec.encode(FlatTensors(numbers(ODD, 6), ODD), at())
    broken: Sequence[Payload] = [
        (seed, scales[:-1], codes),
        (seed, scales, codes[:-1]),
        (seed.int(), scales, codes),
        (scales, codes),
        (seed, torch.full_like(scales, torch.inf), codes),
    ]
    for payload in broken:
        with pytest.raises(MalformedError):
            codec.decode([(seed, scales, codes), payload], ODD, out)
        assert torch.equal(out, kept)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"bits": 3}, r"bits must be 1, 2 or 4.*got 3. Write EDEN\(bits=2\)"),
        ({"block": 100}, r"block must be a power of two from 8 to 16384, got 100.*Write EDEN\(bits=1, block=4096\)"),
    ],
)
def test_eden_rejects(options: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        EDEN(**options)


def test_a_recipe_adds_no_feedback_to_it() -> None:
    assert repr(resolve("EDEN(bits=2)", 4).compressor) == "Route(EDEN(bits=2))"


def test_tensors_without_entries_are_encoded() -> None:
    x = FlatTensors.pack({"none": torch.empty(0, 3)})
    payload = EDEN().encode(x, AggregationContext())
    EDEN().decode([payload], x.layout, x.flat)
    assert [len(each) for each in payload] == [1, 0, 0]
