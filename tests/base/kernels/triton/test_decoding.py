"""Payloads are checked before anything is written, and added up in the order given."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="the extra gpu is not installed")

from support.kernel_codecs import Codec
from support.triton_codecs import CODECS, EVERY, every_codec, numbers, told
from torch import Tensor

from gossamer.errors import MalformedError, OutOfRange

pytestmark = told

N, SIZES = 2201, [0, 2101, 100]
MALFORMED = {  # bytes that no encoder writes
    "twobit, given": [0b00010000],
    "twobit, measured": [0b01000000],
    "ternary, 4 a byte": [0b11000000, 0b00000011],
    "ternary, 5 a byte": [243, 255],
    "levels, 1 levels": [0b00001100],
    "levels, 127 levels": [255],
    "float4, float4": [0x08, 0x80],
}


def payloads(codec: Codec) -> list[tuple[Tensor, ...]]:
    return [codec.encode(numbers("plain", N, seed), SIZES, None, plain=True) for seed in range(2)]


def refused(codec: Codec, heard: list[tuple[Tensor, ...]], error: type[Exception], sizes: list[int] = SIZES) -> None:
    """By both, and nothing is written."""
    for plain in (True, False):
        out = torch.full((sum(sizes),), 7.0)
        with pytest.raises(error) as raised:
            codec.decode(heard, sizes, out, 2, plain=plain)
        assert raised.type is error
        assert bool((out == 7).all())


@pytest.mark.parametrize("name", MALFORMED)
def test_codes_that_no_encoder_writes_are_refused(name: str) -> None:
    good, other = payloads(EVERY[name])
    for byte in MALFORMED[name]:
        for place in (0, 140, len(good[1]) - 1):
            bad = (good[0], other[1].clone())
            bad[1][place] = byte
            refused(EVERY[name], [good, bad], MalformedError)


@every_codec
def test_what_is_left_of_a_byte_is_zero(codec: Codec) -> None:
    """Payloads that stand for the same are the same."""
    if codec.name == "int8" or codec.options[-1] in (127, 2**15 - 1):
        return  # whole bytes
    sizes = [9, 9]
    good = codec.encode(numbers("plain", 18), sizes, None, plain=True)
    for place in (len(good[1]) // 2 - 1, len(good[1]) - 1):
        bad = (good[0], good[1].clone())
        bad[1][place] = bad[1][place] + 81 if codec.options == (5,) else bad[1][place] | 128
        refused(codec, [good, bad], MalformedError, sizes)


@every_codec
@pytest.mark.parametrize(
    ("number", "error"), [(math.nan, MalformedError), (-math.inf, MalformedError), (3e38, OutOfRange)]
)
def test_scales_that_cannot_be_added_up_are_refused(codec: Codec, number: float, error: type[Exception]) -> None:
    good, other = payloads(codec)
    bad = (other[0].clone(), other[1])
    bad[0][-1] = number
    refused(codec, [bad, good], error)  # of ternary payloads all hold the same scales


@every_codec
def test_payloads_of_another_size_or_type_are_refused(codec: Codec) -> None:
    scales, codes = payloads(codec)[0]
    for bad in ((scales[:-1], codes), (scales, codes[1:]), (scales.double(), codes), (scales, codes.int())):
        refused(codec, [bad], MalformedError)


@pytest.mark.parametrize("name", ["int8, nearest", "sign_magnitude, sign_magnitude"])
def test_sums_are_rounded_once_an_addition_in_the_order_given(name: str) -> None:
    codec = EVERY[name]
    one = numbers("plain", N)
    heard = [codec.encode(one * factor, SIZES, None, plain=True) for factor in (1.0, -1.0, 2.0**-20)]
    found = {}
    for label, order in (("given", heard), ("backward", heard[::-1])):
        for plain in (True, False):
            out = found[label, plain] = torch.empty(N)
            codec.decode(order, SIZES, out, 3, plain=plain)
    assert torch.equal(found["given", True], found["given", False])
    assert torch.equal(found["backward", True], found["backward", False])
    assert not torch.equal(found["given", False], found["backward", False])


@pytest.mark.parametrize("module", CODECS)
def test_the_divisor_is_the_callers(module: str) -> None:
    codec = next(iter(CODECS[module].values()))
    heard, found = payloads(codec)[:1], {}
    for divisor in (1, 3):
        for plain in (True, False):
            found[divisor, plain] = torch.empty(N)
            codec.decode(heard, SIZES, found[divisor, plain], divisor, plain=plain)
        assert torch.equal(found[divisor, True], found[divisor, False])
    assert not torch.equal(found[1, False], found[3, False])
    assert torch.equal(found[1, False] / 3, found[3, False])


def test_nothing_heard_is_zero() -> None:
    out = torch.full((N,), 7.0)
    EVERY["onebit, onebit"].decode([], SIZES, out, 1, plain=False)
    assert torch.equal(out, torch.zeros(N))
