"""Noise within Triton kernels is that of plain torch."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="the extra gpu is not installed")
tl = triton.language

from gossamer.base.kernels.reference import counter_rng  # noqa: E402
from gossamer.base.kernels.triton import noise  # noqa: E402
from gossamer.base.kernels.triton.launch import EXACT  # noqa: E402

KEYS = [0, 7, 2**31 + 5, 2**62 + 2**33 + 1, 2**64 - 1]


@triton.jit
def _paired(y, low, high, digits: tl.constexpr, length: tl.constexpr):
    place = tl.arange(0, length)
    tl.store(y + place, noise.paired(place, low, high, digits))


@pytest.mark.parametrize("digits", [8, 24])
@pytest.mark.parametrize("key", KEYS)
def test_noise_is_that_of_the_reference(digits: int, key: int) -> None:
    y = torch.empty(256, dtype=torch.int32)
    _paired[(1,)](y, *noise.halves_of(key), digits=digits, length=256, **EXACT)
    assert torch.equal(y, counter_rng.paired(key, 256, bits=digits))
    assert not torch.equal(y, counter_rng.paired(key ^ 1, 256, bits=digits))


@pytest.mark.parametrize("word", KEYS)
def test_both_halves_of_any_word_are_numbers_of_32_bits_with_a_sign(word: int) -> None:
    """A kernel is compiled anew where one is wider."""
    low, high = noise.halves_of(word)
    assert all(-(2**31) <= half < 2**31 for half in (low, high))
    assert (high % 2**32 << 32) + low % 2**32 == word


@triton.jit
def _stochastic(w, unit, y, low, high, most: tl.constexpr, bits: tl.constexpr, length: tl.constexpr):
    place = tl.arange(0, length)
    scale = tl.load(unit + place)
    tl.store(y + place, noise.stochastic(tl.load(w + place), scale, place, low, high, most, bits))


@pytest.mark.parametrize("most", [1, 100, 127, 128, 2**15 - 1])
def test_rounding_is_that_of_the_reference(most: int) -> None:
    """With as many digits behind the point, whatever the most is; units of any size, and zero."""
    w = torch.randn(256, generator=torch.Generator().manual_seed(most)) * most
    unit = torch.cat([torch.ones(64), torch.full((64,), 0.37), torch.full((64,), 1e-35), torch.zeros(64)])
    w[128:192] *= 1e-35
    found, y = counter_rng.stochastic(w, unit, most, KEYS[3]), torch.empty(256, dtype=torch.int32)
    bits = (2 * most).bit_length()
    _stochastic[(1,)](w, unit, y, *noise.halves_of(KEYS[3]), most=most, bits=bits, length=256, **EXACT)
    assert torch.equal(y, found.int())
    assert y.abs().max() == most
    assert not torch.equal(y, counter_rng.stochastic(w, unit, most, KEYS[3] + 1).int())
