"""Ternary codes on a GPU have the bits of plain torch."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="the extra gpu is not installed")

from support.kernel_codecs import Codec
from support.triton_codecs import LARGE, broken, caught, compared, corpus, every_type, numbers, of, told

from gossamer.base.kernels import triton as kernels
from gossamer.base.kernels.triton import ternary
from gossamer.errors import NotFinite

pytestmark = told


@of("ternary")
@every_type
def test_bits_are_those_of_plain_torch(codec: Codec, dtype: torch.dtype, place: str | None) -> None:
    x, sizes = corpus(dtype)
    compared(codec, x, sizes, None if place is None else corpus(seed=1)[0], place or "apart")


@of("ternary")
@pytest.mark.parametrize("sizes", [[], [0], [1], [64, 7]], ids=str)
def test_small_tensors(codec: Codec, sizes: list[int]) -> None:
    compared(codec, numbers("plain", sum(sizes)), sizes, numbers("plain", sum(sizes), 1))


def test_a_large_tensor() -> None:
    compared(broken()["ternary"]["5 a byte"], numbers("plain", LARGE), [LARGE], numbers("plain", LARGE, 1))


@pytest.mark.parametrize("per_byte", [4, 5])
@pytest.mark.parametrize("sizes", [[319, 321], [4, 5121]], ids=str)
def test_entries_that_share_a_byte_lie_where_plain_torch_has_them(per_byte: int, sizes: list[int]) -> None:
    compared(
        broken()["ternary"][f"{per_byte} a byte"], numbers("mixed", sum(sizes)), sizes, numbers("plain", sum(sizes))
    )


@pytest.mark.parametrize("per_byte", [4, 5])
def test_what_is_left_may_take_the_place_of_what_was_given(per_byte: int) -> None:
    x, sizes = corpus()
    scales, apart = torch.full((len(sizes),), 0.7), torch.empty_like(x)
    codes = ternary.ternary.ternary_encode(x, sizes, scales, 5, per_byte, apart)
    assert torch.equal(kernels.ternary_encode(x, sizes, scales, 5, per_byte, x), codes)
    assert torch.equal(x, apart)


@pytest.mark.parametrize("per_byte", [4, 5])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 2, 69])
def test_a_value_that_is_not_finite_is_noticed_whatever_its_place_in_a_byte(
    per_byte: int, number: float, place: int
) -> None:
    x = numbers("plain", 70)
    x[place] = 3e38
    kernels.ternary_encode(x, [70], torch.ones(1), 5, per_byte)
    x[place] = number
    with pytest.raises(NotFinite):
        kernels.ternary_encode(x, [70], torch.ones(1), 5, per_byte)


def test_mutants_are_caught() -> None:
    x, sizes = corpus()

    def of_another_key(x, sizes, scales, key, per_byte, after=None):
        return kernels.ternary_encode(x, sizes, scales, key + 1, per_byte, after)

    for twin in broken(ternary_encode=of_another_key)["ternary"].values():
        caught(twin, x, sizes)
