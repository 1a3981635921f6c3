"""Quantization kernels: compiled loops equal plain torch to the bit, and what is not sent is left."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_codecs import (
    CODECS,
    KEY,
    SIZES,
    Codec,
    Int8Nearest,
    Measured,
    bits,
    compiled,
    every_codec,
    fast,
    numbers,
    same,
)

from gossamer.base.kernels import quantize
from gossamer.base.kernels.reference import levels, onebit, ternary, twobit
from gossamer.base.kernels.reference import quantize as quantise
from gossamer.base.kernels.reference.residual import Residual
from gossamer.base.kernels.reference.segments import LARGEST_BLOCK
from gossamer.errors import NotFinite


@compiled
@every_codec
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 5, 7, 8, 9, 63, 64, 65, 300, 1279, 1281, 2600]), max_size=5),
    kind=st.sampled_from(["plain", "tiny", "huge", "ties", "zeros", "mixed"]),
    seed=st.integers(0, 1000),
    shift=st.integers(0, 3),
    owed=st.booleans(),
)
def test_compiled_loops_equal_plain_torch(
    codec: Codec, sizes: list[int], kind: str, seed: int, shift: int, owed: bool
) -> None:
    x, before = (numbers(kind, sum(sizes) + 3, seed + i)[shift : shift + sum(sizes)] for i in (0, 1))
    same(codec, x, before if owed else None, sizes)


@compiled
@every_codec
def test_compiled_loops_serve_many_small_tensors_and_large_ones(codec: Codec) -> None:
    same(codec, numbers("plain", 30_000, 1), numbers("plain", 30_000, 2), [100] * 200 + [10_000])


@compiled
def test_compiled_loops_serve_the_largest_blocks_and_leave_larger_ones_to_plain_torch() -> None:
    x = numbers("plain", LARGEST_BLOCK + 5, 3)
    for block in (LARGEST_BLOCK, 2 * LARGEST_BLOCK):
        same(Codec(fast, onebit, "onebit", (block,)), x, x.flip(0), [len(x)])
        same(Codec(fast, levels, "levels", (block, 5), key=True), x, x.flip(0), [len(x)])
        same(Measured(fast, twobit, "twobit", (block,)), x, x.flip(0), [len(x)])


@pytest.mark.parametrize("plain", [True, False])
def test_sums_are_taken_by_halves(plain: bool) -> None:
    """From left to right it would be 2^24, and rounded once 2^24 + 8."""
    x = torch.tensor([2.0**24] + [1.0] * 7)
    scales, _ = Codec(fast, onebit, "onebit", (8,)).encode(x, [8], None, plain=plain)
    assert float(scales) * 8 == 2**24 + 6


@every_codec
@pytest.mark.parametrize("plain", [True, False])
def test_in_place_the_residual_is_the_same(codec: Codec, plain: bool) -> None:
    x, before = numbers("plain", sum(SIZES), 5), numbers("plain", sum(SIZES), 6)
    apart = Residual(before, torch.empty_like(before))
    together = Residual(before.clone(), torch.empty(0))
    codec.encode(x, SIZES, apart, plain=plain)
    codec.encode(x, SIZES, Residual(together.before, together.before), plain=plain)
    assert torch.equal(bits(apart.after), bits(together.before))


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("plain", [True, False])
def test_what_is_not_sent_is_left(codec: Codec, dtype: torch.dtype, plain: bool) -> None:
    n = sum(SIZES)
    wide = torch.promote_types(dtype, torch.float32)
    x = numbers("plain", n, 7).to(dtype)
    residual = Residual(numbers("plain", n, 8).to(wide), torch.empty(n, dtype=wide))
    payload = codec.encode(x, SIZES, residual, plain=plain)
    out = torch.empty(n, dtype=wide)
    codec.decode([payload] * 3, SIZES, out, 3, plain=plain)
    torch.testing.assert_close(out + residual.after, x + residual.before, atol=2e-5, rtol=0)
    assert not torch.allclose(out - residual.after, x + residual.before, atol=2e-5, rtol=0)


@every_codec
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_noticed_wherever_it_is(codec: Codec, plain: bool, number: float) -> None:
    for place in (0, 11, 12, 13, 200, sum(SIZES) - 1):
        x = numbers("plain", sum(SIZES), 9)
        zeros = torch.zeros_like(x)
        x[place] = number
        for residual in (None, Residual(zeros, zeros.clone()), Residual(x, zeros.clone())):
            with pytest.raises(NotFinite):
                codec.encode(x if residual is None or residual.before is zeros else zeros, SIZES, residual, plain=plain)


@pytest.mark.parametrize("plain", [True, False])
def test_sums_that_leave_the_range_are_noticed(plain: bool) -> None:
    with pytest.raises(NotFinite):
        CODECS["onebit"].encode(torch.full((64,), 3e38), [64], None, plain=plain)
    with pytest.raises(NotFinite):
        CODECS["levels 7"].encode(torch.full((64,), 1e20), [64], None, plain=plain)
    with pytest.raises(NotFinite):
        CODECS["int8"].encode(
            torch.full((8,), 3e38), [8], Residual(torch.full((8,), 3e38), torch.empty(8)), plain=plain
        )


@every_codec
def test_shapes_are_known_without_data(codec: Codec) -> None:
    x = numbers("plain", sum(SIZES), 13)
    payload = codec.encode(x, SIZES, None, plain=True)
    if codec.given:
        return  # thresholds are given
    blank = codec.encode(x.to("meta"), SIZES, None, plain=False)
    assert [(part.shape, part.dtype) for part in payload] == [(part.shape, part.dtype) for part in blank]


@every_codec
@pytest.mark.parametrize("plain", [True, False])
def test_zeros_stay_zeros(codec: Codec, plain: bool) -> None:
    x = torch.zeros(sum(SIZES))
    residual = Residual(torch.zeros_like(x), torch.full_like(x, 5.0))
    payload = codec.encode(x, SIZES, residual, plain=plain)
    out = torch.full_like(x, 7.0)
    codec.decode([payload, payload], SIZES, out, 2, plain=plain)
    assert torch.equal(out, x)
    assert torch.equal(residual.after, x)


@compiled
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, 64, 300, 5000]), max_size=4),
    kind=st.sampled_from(["plain", "tiny", "huge", "mixed"]),
    block=st.sampled_from([8, 256, 2048]),
)
def test_sums_of_squares_equal_plain_torch(sizes: list[int], kind: str, block: int) -> None:
    x = numbers(kind, sum(sizes), 15)
    sums = quantize.squares(x, sizes, block)
    assert torch.equal(sums, ternary.squares(x, sizes, block))
    assert float(sums.sum()) == pytest.approx(float(x.double().square().sum()), rel=1e-12)


@compiled
def test_sums_of_many_workers_are_exact() -> None:
    """More payloads than fit into one byte's counts."""
    n = 700
    x = numbers("plain", n, 14)
    scales = ternary.magnitudes(x, [n])
    payload = (ternary.ternary_encode(x, [n], scales, KEY, 5),)
    one, many, truth = torch.empty(n), torch.empty(n), torch.empty(n)
    quantize.ternary_decode([payload], scales, [n], 5, one)
    quantize.ternary_decode([payload] * 300, scales, [n], 5, many, 300)
    ternary.ternary_decode([payload] * 300, scales, [n], 5, truth, 300)
    assert torch.equal(many, truth)
    torch.testing.assert_close(many, one)


@pytest.mark.parametrize(
    ("codec", "unbiased"),
    [
        (Codec(fast, quantise, "int8", (1024,), key=True), True),
        (CODECS["levels 7"], True),
        (CODECS["ternary, five a byte"], True),
        (Int8Nearest(fast, quantise, "int8", (1024,)), False),
    ],
)
def test_stochastic_codes_are_unbiased_and_the_nearest_are_not(codec: Codec, unbiased: bool) -> None:
    """20 tensors of 1000 equal entries, but for one that sets the scale: the mean error of each, in standard errors."""
    repeats = 1000
    x = torch.linspace(-0.97, 0.93, 20).repeat_interleave(repeats)
    x[::repeats] = 1.0
    out = torch.empty_like(x)
    codec.decode([codec.encode(x, [repeats] * 20, None, plain=False)], [repeats] * 20, out, 1, plain=False)
    error = (out - x).view(20, repeats)[:, 1:].double()
    z = error.mean(1) / (error.std(1) / math.sqrt(repeats - 1) + 1e-9)
    assert (float(z.abs().max()) <= 4.5) == unbiased
