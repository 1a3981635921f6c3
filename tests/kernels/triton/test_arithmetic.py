"""Arithmetic within Triton kernels: the bits of plain torch."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="the extra gpu is not installed")
tl = triton.language

from gossamer.kernels.reference import counter_rng  # noqa: E402
from gossamer.kernels.reference.gram_schmidt import sum_of_halves  # noqa: E402
from gossamer.kernels.triton import arithmetic  # noqa: E402
from gossamer.kernels.triton.launch import EXACT  # noqa: E402


@triton.jit
def _sum(x, y, length: tl.constexpr):
    tl.store(y, arithmetic.sum_of_halves(tl.load(x + tl.arange(0, length)), length))


@triton.jit
def _paired(y, low, high, bits: tl.constexpr, length: tl.constexpr):
    place = tl.arange(0, length)
    tl.store(y + place, arithmetic.paired(place, low, high, bits))


@pytest.mark.parametrize("length", [1, 2, 8, 256, 2**14])
def test_sums_are_taken_by_halves(length: int) -> None:
    x, y = torch.randn(length, generator=torch.Generator().manual_seed(length)), torch.empty(1)
    _sum[(1,)](x, y, length=length, **EXACT)
    assert torch.equal(y, sum_of_halves(x[None, :, None]).view(1))
    if length >= 256:  # the twin: another order
        assert not torch.equal(y, x.cumsum(0)[-1:])


@triton.jit
def _quotient(x, y, out, length: tl.constexpr):
    place = tl.arange(0, length)
    tl.store(out + place, tl.div_rn(tl.load(x + place), tl.load(y + place)))


@pytest.mark.parametrize("scale", [1.0, 1e-38, 1e-42, 1e30])
def test_quotients_are_rounded_once(scale: float) -> None:
    x, y = torch.randn(2, 1024, generator=torch.Generator().manual_seed(1))
    x, y = x * scale, y.abs() + 0.5
    out = torch.empty(1024)
    _quotient[(1,)](x, y, out, length=1024, **EXACT)
    assert torch.equal(out.view(torch.int32), (x / y).view(torch.int32))
    twin = torch.zeros(1024) if scale < 1e-40 else x * (1 / y)  # denormal numbers taken for zero; a product
    assert not torch.equal(out, twin)


@pytest.mark.parametrize("bits", [8, 24])
@pytest.mark.parametrize("key", [0, 7, 2**31 + 5, 2**62 + 2**33 + 1])
def test_noise_is_that_of_the_reference(bits: int, key: int) -> None:
    y = torch.empty(256, dtype=torch.int32)
    _paired[(1,)](y, *arithmetic.halves_of(key), bits=bits, length=256, **EXACT)
    assert torch.equal(y, counter_rng.paired(key, 256, bits=bits))
    assert not torch.equal(y, counter_rng.paired(key + 1, 256, bits=bits))
