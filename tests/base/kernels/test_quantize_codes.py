"""Quantization codes: what they stand for, and what no encoder writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.kernel_codecs import CODECS, KEY, MALFORMED, SIZES, Codec, every_codec, numbers

from gossamer.base.kernels import packed_bytes, quantize
from gossamer.base.kernels.reference import levels, onebit, ternary, twobit
from gossamer.base.kernels.reference import quantize as quantise
from gossamer.errors import MalformedError


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
