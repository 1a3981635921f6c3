"""Half-precision kernels: rounded to nearest, summed in float32, and compiled loops to the same bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.base import rng
from gossamer.base.kernels import buffer_pool, library
from gossamer.base.kernels import checks as native_checks
from gossamer.base.kernels import quantize as native_halves
from gossamer.base.kernels.reference import finite
from gossamer.base.kernels.reference import half as halves
from gossamer.errors import MalformedError, NotFinite

HALVES = [torch.bfloat16, torch.float16]
MODULES = [halves, native_halves]
SIZES = [0, 1, 7, 33, 1279, 1280, 1281, 4000]
STREAMED = 2**20 + 77  # written around the caches
MAX = torch.finfo(torch.float32).max

every_module = pytest.mark.parametrize("module", MODULES, ids=["plain", "compiled"])
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
compiled = pytest.mark.skipif(not library.LIBRARY.exists(), reason="the compiled loops were not built")


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def every_pattern(dtype: torch.dtype) -> Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def around(dtype: torch.dtype) -> Tensor:
    """Every finite half, what lies in the middle between it and the next, and the floats beside both."""
    half = every_pattern(dtype)
    exact = half[half.isfinite()].double()
    middle = (exact[:-1] + exact[1:]) / 2
    x = torch.cat([exact, middle]).float()
    x = torch.cat([x, torch.nextafter(x, torch.tensor(math.inf)), torch.nextafter(x, torch.tensor(-math.inf))])
    return x[x.isfinite()]


def draws(n: int, name: object) -> Tensor:
    return torch.randn(n, generator=rng.generator("halves", str(name)))


# -- to the bit ----------------------------------------------------------------------------------------------------


@compiled
@every_half
def test_every_half_and_every_middle_is_rounded_to_the_same_bits(dtype: torch.dtype) -> None:
    x = torch.cat(
        [around(dtype), torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-149), 65504, 65519.996, 65520, MAX, -MAX])]
    )
    fast, plain = native_halves.half_encode(x, dtype), halves.half_encode(x, dtype)
    assert fast.dtype == dtype
    assert torch.equal(bits(fast), bits(plain))
    toward_zero = (bits(x) & -(2**16)).view(torch.float32).to(dtype)
    assert not torch.equal(bits(toward_zero), bits(plain))


@compiled
@every_half
def test_every_pattern_is_widened_to_the_same_bits(dtype: torch.dtype) -> None:
    half = every_pattern(dtype)
    fast, plain = torch.empty(2**16), torch.empty(2**16)
    assert not native_halves.half_decode([half], fast)
    assert not halves.half_decode([half], plain)
    quiet = ~half.isnan() | (bits(half) & 0x200 != 0) | (dtype == torch.bfloat16)  # torch itself is of two minds
    assert torch.equal(bits(fast)[quiet], bits(plain)[quiet])
    assert bool(fast[~quiet].isnan().all())


@compiled
@every_half
@pytest.mark.parametrize("n", [*SIZES, STREAMED])
def test_sums_have_the_same_bits(dtype: torch.dtype, n: int) -> None:
    payloads = [halves.half_encode(draws(n, rank) * 2.0 ** (-9 * rank), dtype) for rank in range(4)]
    assert torch.equal(bits(native_halves.half_encode(draws(n, 0), dtype)), bits(payloads[0]))
    for count in (1, 2, 4):
        for divisor in (1, 3):
            fast, plain = torch.full((n,), 7.0), torch.full((n,), 7.0)
            assert native_halves.half_decode(payloads[:count], fast, divisor)
            assert halves.half_decode(payloads[:count], plain, divisor)
            assert torch.equal(bits(fast), bits(plain))


@compiled
@every_half
def test_numbers_that_lie_anywhere(dtype: torch.dtype) -> None:
    """Buffers that begin within a line of the cache."""
    x = draws(STREAMED + 9, "anywhere")
    for start in (1, 5, 9):
        part = x[start : start + STREAMED]
        assert torch.equal(native_halves.half_encode(part, dtype), part.to(dtype))
        out = torch.empty(STREAMED + 9)[start : start + STREAMED]
        native_halves.half_decode([x.to(dtype)[start : start + STREAMED]], out)
        assert torch.equal(out, part.to(dtype).float())


@compiled
@every_half
def test_what_a_processor_may_flush_to_zero_stays(dtype: torch.dtype) -> None:
    x = around(dtype)
    due = halves.half_encode(x, dtype)
    meant = due.float()
    out = torch.empty_like(x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes nothing")
    try:
        fast = native_halves.half_encode(x, dtype)
        native_halves.half_decode([due], out)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(bits(fast), bits(due))
    assert torch.equal(bits(out)[due.isfinite()], bits(meant)[due.isfinite()])


# -- what it says ------------------------------------------------------------------------------------------------------


@every_module
@every_half
def test_a_sum_is_taken_in_four_bytes(module: Any, dtype: torch.dtype) -> None:
    """One and many small numbers, each of which alone would be rounded away."""
    small = torch.full((5,), 2.0**-12, dtype=dtype)
    payloads = [torch.ones(5, dtype=dtype), *[small] * 64]
    out = torch.empty(5)
    module.half_decode(payloads, out, 1)
    assert torch.equal(out, torch.full((5,), 1 + 64 * 2.0**-12))
    assert float(sum(payloads)[0]) == 1.0


@every_module
@every_half
def test_signs_of_zeros_stay(module: Any, dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, -1.0])
    payload, out = module.half_encode(x, dtype), torch.empty(3)
    module.half_decode([payload], out)
    assert torch.equal(bits(out), bits(x))


@every_module
@every_half
@pytest.mark.parametrize("number", [math.nan, -math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_noticed_wherever_it_is(module: Any, dtype: torch.dtype, number: float) -> None:
    for place in (0, 1, 1279, 1280, 3999):
        x = draws(4000, "noticed")
        x[place] = number
        with pytest.raises(NotFinite):
            module.half_encode(x, dtype)


@every_module
@every_half
@pytest.mark.parametrize("terms", [1, 2, 3, 7])
def test_what_could_leave_the_range_of_a_sum_is_noticed(module: Any, dtype: torch.dtype, terms: int) -> None:
    limit = torch.tensor(MAX / terms)
    beyond = torch.nextafter(limit, torch.tensor(math.inf))
    for sign in (1, -1):
        x = torch.cat([torch.ones(9), sign * limit.view(1)])
        assert bits(module.half_encode(x, dtype, terms)).tolist() == bits(x.to(dtype)).tolist()
        x[-1] = sign * beyond
        with pytest.raises(NotFinite):
            module.half_encode(x, dtype, terms)


@every_module
def test_an_infinite_result_is_reported(module: Any) -> None:
    out = torch.empty(2000)
    for place in (0, 1500):
        payload = torch.ones(2000, dtype=torch.float16)
        assert module.half_decode([payload], out)
        payload[place] = math.inf
        assert not module.half_decode([payload, payload], out, 2)
        assert float(out[place]) == math.inf
    large = torch.full((3,), 3e38, dtype=torch.bfloat16)
    assert not module.half_decode([large, large], torch.empty(3), 2)


@every_module
@every_half
def test_payloads_of_another_size_or_type_are_refused(module: Any, dtype: torch.dtype) -> None:
    good, other = torch.ones(8, dtype=dtype), next(each for each in HALVES if each != dtype)
    for bad in (torch.ones(7, dtype=dtype), torch.ones(1, dtype=dtype), torch.ones(8, dtype=other)):
        out = torch.full((8,), 7.0)
        with pytest.raises(MalformedError):
            module.half_decode([good, bad], out)
        assert bool((out == 7).all())


@every_half
@pytest.mark.parametrize("other", [torch.float64, torch.float32, "meta"], ids=str)
def test_what_is_not_served_comes_to_the_same(dtype: torch.dtype, other: Any) -> None:
    x = draws(50, "other").to(other)
    payload = native_halves.half_encode(x, dtype if other != torch.float32 else torch.float64)
    assert (payload.shape, payload.device) == (x.shape, x.device)
    out = torch.empty_like(x)
    assert native_halves.half_decode([payload], out)
    if not x.is_meta:
        assert torch.equal(out, x.to(payload.dtype).to(x.dtype))


# -- ranges, and room --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("terms", [1, 3, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_both_know_the_range(dtype: torch.dtype, terms: int) -> None:
    limit = torch.tensor(torch.finfo(dtype).max / terms, dtype=dtype)
    for number in (0.0, float(limit), -float(limit), math.inf, -math.inf, math.nan, torch.finfo(dtype).max):
        x = torch.zeros(3, 5, dtype=dtype)
        x[2, 3] = number
        assert native_checks.within_range(x, terms) == finite.within_range(x, terms) == (abs(number) <= limit)
    assert native_checks.within_range(torch.empty(0, dtype=dtype), terms)
    assert native_checks.within_range(torch.empty(5, device="meta", dtype=dtype), terms)


def test_room_is_like_what_it_is_for() -> None:
    x = torch.zeros(buffer_pool.LARGE)
    assert (buffer_pool.scratch_like(x).shape, buffer_pool.scratch_like(x).dtype) == (x.shape, x.dtype)
    assert buffer_pool.scratch_like(x, torch.bfloat16).dtype == torch.bfloat16
    assert buffer_pool.scratch_like(x.to("meta"), torch.float16).is_meta
