"""Half precision on a GPU has the bits of plain torch."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="the extra gpu is not installed")

from support.triton_codecs import LARGE, TYPES, numbers, told
from torch import Tensor

from gossamer.base.kernels.reference import half as truth
from gossamer.base.kernels.triton import half
from gossamer.errors import MalformedError, NotFinite

pytestmark = told

every_half = pytest.mark.parametrize("dtype", half.HALVES, ids=str)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def every_number(dtype: torch.dtype) -> Tensor:
    found = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    return found[found.isfinite()]


def around(dtype: torch.dtype) -> Tensor:
    """Every finite half, what lies in the middle between it and the next, and the floats beside both."""
    exact = every_number(dtype).double()
    x = torch.cat([exact, (exact[:-1] + exact[1:]) / 2]).float()
    beside = [torch.nextafter(x, torch.tensor(way)) for way in (math.inf, -math.inf)]
    x = torch.cat([x, *beside, torch.tensor([65519.996, 65520, 3.4e38, -3.4e38, 2.0**-149])])
    return x[x.isfinite()]


@every_half
def test_every_half_and_every_middle_is_rounded_to_the_same_bits(dtype: torch.dtype) -> None:
    x = around(dtype)
    found = half.half_encode(x, dtype)
    assert found.dtype == dtype
    assert torch.equal(bits(found), bits(truth.half_encode(x, dtype)))
    toward_zero = (bits(x) & -(2**16)).view(torch.float32).to(dtype)
    away = (bits(x) + 2**15 & -(2**16)).view(torch.float32).to(dtype)
    for twin in (toward_zero, away):
        assert not torch.equal(bits(found), bits(twin))


@every_half
@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16], ids=str)
def test_halves_become_halves(dtype: torch.dtype, given: torch.dtype) -> None:
    x = every_number(given)
    assert torch.equal(bits(half.half_encode(x, dtype)), bits(truth.half_encode(x, dtype)))


@every_half
@pytest.mark.parametrize("n", [0, 1, 7, 2049, LARGE])
def test_sums_have_the_same_bits(dtype: torch.dtype, n: int) -> None:
    heard = [(numbers("plain", n, rank) * 2.0 ** (-9 * rank)).to(dtype) for rank in range(3)]
    for count, divisor in ((1, 1), (1, 3), (3, 3)):
        found, expected = torch.full((n,), 7.0), torch.full((n,), 7.0)
        assert half.half_decode(heard[:count], found, divisor)
        assert truth.half_decode(heard[:count], expected, divisor)
        assert torch.equal(bits(found), bits(expected))
    if n > 7:
        backward, undivided = torch.empty(n), torch.empty(n)
        half.half_decode(heard[::-1], backward, 3)
        half.half_decode(heard, undivided)
        for twin in (backward, undivided):
            assert not torch.equal(found, twin)


@every_half
def test_every_number_is_widened_and_zeros_keep_their_sign(dtype: torch.dtype) -> None:
    x = every_number(dtype)
    out = torch.empty(len(x))
    assert half.half_decode([x], out)
    assert torch.equal(bits(out), bits(x.float()))


@every_half
def test_rows_of_a_gathered_buffer(dtype: torch.dtype) -> None:
    gathered = numbers("plain", 300).to(dtype).view(3, 100)
    found, expected = torch.empty(100), torch.empty(100)
    half.half_decode(gathered.unbind(), found, 3)
    truth.half_decode(gathered.unbind(), expected, 3)
    assert torch.equal(found, expected)


@every_half
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_noticed_wherever_it_is(dtype: torch.dtype, number: float) -> None:
    for place in (0, 3999):
        x = numbers("plain", 4000)
        x[place] = number
        with pytest.raises(NotFinite):
            half.half_encode(x, dtype)
        out = torch.empty(4000)
        assert not half.half_decode([x.to(dtype)] * 2, out, 2)
        assert torch.equal(out.isfinite(), x.isfinite())


@every_half
@pytest.mark.parametrize("given", TYPES, ids=str)
@pytest.mark.parametrize("terms", [1, 3, 7])
def test_what_could_leave_the_range_of_a_sum_is_noticed(dtype: torch.dtype, given: torch.dtype, terms: int) -> None:
    limit = torch.tensor(torch.finfo(given).max / terms, dtype=given)
    for number in (limit, torch.nextafter(limit, torch.zeros((), dtype=given))):
        x = torch.stack([number, -number])
        assert torch.equal(bits(half.half_encode(x, dtype, terms)), bits(truth.half_encode(x, dtype, terms)))
    beyond = torch.nextafter(limit, torch.tensor(math.inf, dtype=given)).view(1)
    for module in (half, truth):
        with pytest.raises(NotFinite):
            module.half_encode(-beyond, dtype, terms)


def test_payloads_of_another_size_or_type_are_refused() -> None:
    good = torch.ones(8, dtype=torch.float16)
    for bad in (good[:7], good.bfloat16()):
        out = torch.full((8,), 7.0)
        with pytest.raises(MalformedError):
            half.half_decode([good, bad], out)
        assert bool((out == 7).all())


@pytest.mark.parametrize("other", [torch.float64, torch.float32])
def test_what_is_not_served_comes_to_the_same(other: torch.dtype) -> None:
    x = numbers("plain", 50)
    payload = half.half_encode(x.to(other), torch.float16 if other != torch.float32 else torch.float64)
    out = torch.empty(50, dtype=torch.float64)
    assert half.half_decode([payload], out)
    assert torch.equal(out, payload.double())
