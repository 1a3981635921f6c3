"""Largest magnitudes and sums of squares on a GPU have the bits of plain torch."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="the extra gpu is not installed")

from support.triton_codecs import LARGE, TYPES, corpus, numbers, told

from gossamer.base.kernels.reference import ternary
from gossamer.base.kernels.triton import measures
from gossamer.errors import NotFinite

pytestmark = told


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64], ids=str)
def test_bits_are_those_of_plain_torch(dtype: torch.dtype) -> None:
    x, sizes = corpus(dtype)
    assert torch.equal(measures.magnitudes(x, sizes), ternary.magnitudes(x, sizes))
    for block in (7 if dtype == torch.float64 else 8, 64):
        if block != 7:
            assert torch.equal(measures.squares(x, sizes, block), ternary.squares(x, sizes, block))
    assert not torch.equal(measures.magnitudes(x, sizes), ternary.magnitudes(x, [sum(sizes)] + [0] * (len(sizes) - 1)))


@pytest.mark.parametrize("sizes", [[], [0], [0, 0], [1], [4096, 1], [LARGE]], ids=str)
def test_sizes(sizes: list[int]) -> None:
    x = numbers("plain", sum(sizes))
    assert torch.equal(measures.magnitudes(x, sizes), ternary.magnitudes(x, sizes))
    assert torch.equal(measures.squares(x, sizes, 2**14), ternary.squares(x, sizes, 2**14))


def test_squares_leave_the_range_of_float32() -> None:
    x = numbers("plain", 300) * 1e30
    found = measures.squares(x, [300], 512)
    assert torch.equal(found, ternary.squares(x, [300], 512))
    assert torch.isfinite(found).all()
    assert not torch.equal(found, x.double().square().cumsum(0)[-1:])  # the twin: another order


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_has_no_magnitude(number: float) -> None:
    for place in (0, 5000):
        x = numbers("plain", 5001)
        x[place] = number
        with pytest.raises(NotFinite):
            measures.magnitudes(x, [4, 4997])
