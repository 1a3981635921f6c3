"""Quantization kernels: compiled loops equal plain torch to the bit, and what is not sent is left."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_codecs import (
    CODECS,
    KEY,
    MALFORMED,
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

from gossamer.base import kernels
from gossamer.base.kernels import packed_bytes, quantize
from gossamer.base.kernels.blocks import within_tensors
from gossamer.base.kernels.reference import levels, onebit, ternary, twobit
from gossamer.base.kernels.reference import quantize as quantise
from gossamer.base.kernels.reference.residual import Residual
from gossamer.base.kernels.reference.segments import LARGEST_BLOCK
from gossamer.errors import MalformedError, NotFinite


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["int8", "float4"])
def test_a_block_of_any_length_is_one_per_tensor(name: str, dtype: torch.dtype) -> None:
    x, sizes, longest = numbers("plain", 1_041, 4).to(dtype), (7, 0, 1_030, 4), sys.maxsize - 1
    encode, decode = getattr(kernels, f"{name}_encode"), getattr(kernels, f"{name}_decode")
    of_all, of_tensors = encode(x, sizes, longest), encode(x, sizes, 1_030)
    assert of_all[0].shape == (3,)
    for one, other in zip(of_all, of_tensors, strict=True):
        assert torch.equal(one, other)
    decoded = [torch.empty(len(x), dtype=torch.promote_types(dtype, torch.float32)) for _ in range(2)]
    decode([of_all], sizes, longest, decoded[0])
    decode([of_tensors], sizes, 1_030, decoded[1])
    assert torch.equal(*decoded)


@compiled
@pytest.mark.parametrize("name", ["int8", "float4"])
def test_compiled_loops_receive_blocks_no_longer_than_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums with longer ones would overflow, and threads that share the work would never end."""
    x, blocks = numbers("plain", 300, 4), []
    sent = getattr(quantize, f"{name}_encode")(x, (300,), 300)
    for call in ("encode", "decode"):
        monkeypatch.setattr(quantize, f"_{name}_{call}".upper(), lambda *given: blocks.append(300 in given[5:-2]) or 0)
    getattr(quantize, f"{name}_encode")(x, (300,), sys.maxsize - 1)
    getattr(quantize, f"{name}_decode")([sent], (300,), sys.maxsize - 1, torch.empty(300))
    assert blocks == [True, True]
    assert [within_tensors(sizes, sys.maxsize) for sizes in ((), (0,), (5, 3), (6,))] == [2, 2, 6, 6]
    assert within_tensors((5, 300), 256) == 256


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
def test_a_value_that_is_not_finite_is_noticed_wherever_it_is(codec: Codec, plain: bool, number: float) -> None:
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


# -- what they stand for, and what no encoder writes -------------------------------------------------------------------


def literal(encode: Callable[..., Any], *arguments: object) -> list[int]:
    found = encode(*arguments)
    return (found[1] if isinstance(found, tuple) else found).tolist()


def test_codes_by_hand() -> None:
    x = torch.tensor([1.0, -1.0, -0.0, 0.25, -3.0, 0.5, 2.0, -2.0, -1.0])
    assert literal(onebit.onebit_encode, x, [9], 8) == [0b10010010, 1]
    assert literal(twobit.twobit_encode, x, [9], 16, torch.tensor([1.0])) == [0b00001011, 0b10110010, 0b10]
    assert literal(twobit.twobit_encode, x, [9], 8, torch.tensor([1.0, 1.5])) == [0b00001011, 0b10110010, 0]
    trits = [1, 2, 0, 1, 2]  # scales below every magnitude: everything but zero is sent
    scale = torch.tensor([0.1])
    assert literal(ternary.ternary_encode, x[:5], [5], scale, KEY, 5) == [sum(t * 3**k for k, t in enumerate(trits))]
    assert literal(ternary.ternary_encode, x[:5], [5], scale, KEY, 4) == [0b01001001, 0b10]
    # One entry is its block's whole norm: level 3 of 3, code 6 or 0 in three bits; the others stay at 3.
    alone = torch.tensor([0.0, 5.0] + [0.0] * 6 + [-5.0])
    assert literal(levels.levels_encode, alone, [9], 8, 3, KEY) == [0b11110011, 0b10110110, 0b01101101, 0]
    scales, codes = quantise.int8_encode(torch.tensor([254.0, -1.0, 1.0, 3.0, 5.0]), [5], 5)
    assert (scales.tolist(), codes.tolist()) == ([2.0], [127, 0, 0, 2, 2])
    scales, _ = onebit.onebit_encode(x, [9], 8)
    assert scales.tolist() == [9.75 / 8, 1.0]


def test_five_to_a_byte_lie_64_apart_where_there_are_320() -> None:
    x = torch.zeros(330)
    x[[64, 70, 319, 322, 325]] = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    packed = literal(ternary.ternary_encode, x, [330], torch.tensor([0.1]), KEY, 5)
    assert {place: byte for place, byte in enumerate(packed) if byte} == {0: 3, 6: 2 * 3, 63: 81, 64: 9, 65: 2}
    assert len(packed) == 66


def test_measured_thresholds_by_hand() -> None:
    """sum of w^2 / sum of |w|: 25 / 7 and 2, then nothing, then one entry alone."""
    x = torch.tensor([3.0, -4.0, 0, 0, 0, 0, 0, 0, 2.0, -2.0, 0.0, -5.0])
    for module in (twobit, quantize):
        thresholds, codes = module.twobit_measured_encode(x, [10, 1, 1], 8, 0.5)
        assert thresholds.tolist() == [float(torch.tensor(12.5 / 7)), 1.0, 0.0, 2.5]
        assert codes.tolist() == [0b00001011, 0, 0b1011, 0b11, 0b10]


def test_packed_sizes() -> None:
    assert packed_bytes([9, 0, 8, 1], 8) == 4
    assert packed_bytes([9, 0, 8, 1], 5) == 5
    assert [levels.level_bits(count) for count in (1, 2, 3, 4, 7, 8, 127, 128, 2**15 - 1)] == [
        2,
        3,
        3,
        4,
        4,
        5,
        8,
        9,
        16,
    ]
    assert levels.level_bytes([9, 1], 3) == 4 + 1


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("name", MALFORMED)
def test_codes_that_no_encoder_writes_are_refused_before_anything_is_written(name: str, plain: bool) -> None:
    codec, n = CODECS[name], 6000
    good = codec.encode(numbers("plain", n, 10), [n], None, plain=plain)
    out = torch.full((n,), 7.0)
    for place in (0, 700, len(good[1]) - 1):
        bad = (good[0], good[1].clone())
        bad[1][place] = MALFORMED[name]
        with pytest.raises(MalformedError):
            codec.decode([good, bad], [n], out, 2, plain=plain)
    assert bool((out == 7).all())
    codec.decode([good, good], [n], out, 2, plain=plain)
    assert not bool((out == 7).any())


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("name", ["onebit", "twobit", "ternary, four a byte", "levels 3", "levels 16384"])
def test_what_is_left_of_a_byte_is_zero(name: str, plain: bool) -> None:
    """Payloads that stand for the same are the same."""
    codec, sizes = CODECS[name], [9, 9]
    good = codec.encode(numbers("plain", 18, 11), sizes, None, plain=plain)
    bad = (good[0], good[1].clone())
    bad[1][len(good[1]) // 2 - 1] |= 1 << 7
    with pytest.raises(MalformedError):
        codec.decode([bad], sizes, torch.empty(18), 1, plain=plain)


@every_codec
@pytest.mark.parametrize("plain", [True, False])
def test_payloads_of_another_size_or_type_are_refused(codec: Codec, plain: bool) -> None:
    x = numbers("plain", sum(SIZES), 12)
    scales, codes = codec.encode(x, SIZES, None, plain=plain)
    out = torch.full_like(x, 7.0)
    for bad in ((scales[:-1], codes), (scales, codes[1:]), (scales.double(), codes), (scales, codes.int())):
        with pytest.raises(MalformedError):
            codec.decode([bad], SIZES, out, 1, plain=plain)
    assert bool((out == 7).all())
