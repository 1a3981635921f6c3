"""Noise sampling: Gaussian, Skellam and discrete Gaussian numbers from unpredictable random bits."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from itertools import accumulate
from math import ceil, sqrt
from typing import Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.algorithms.strategies.federated_rules.privacy.integer_grid import SPARE, TAIL, WIDEST
from gossamer.algorithms.strategies.federated_rules.privacy.terms import DISCRETE_GAUSSIAN, SKELLAM
from gossamer.errors import require

Words = NDArray[numpy.uint64]


class RandomBits(Protocol):
    """Source of randomness for noise and sampling."""

    def words(self, count: int) -> Words:
        """(count,) independent, uniform words of 64 bits."""


class SystemBits(RandomBits):
    """Random bits of the operating system, suitable for privacy."""

    def words(self, count: int) -> Words:
        return numpy.frombuffer(os.urandom(8 * count), dtype=numpy.uint64)


def uniforms(bits: RandomBits, count: int) -> NDArray[numpy.float64]:
    """(count,) in (0, 1], in steps of 2^-53."""
    return ((bits.words(count) >> numpy.uint64(11)).astype(numpy.float64) + 1.0) * 2.0**-53


DRAWS = 4
GAUSSIAN_PIECE = 1 << 17  # numbers per call, to limit memory


def gaussian(count: int, deviation: float, bits: RandomBits) -> Tensor:
    """Independent Gaussian numbers (count,) of mean 0 and standard deviation `deviation`, in float64.

    A single draw by Box and Muller's formula can take only some floating-point values, so the result would reveal which
    numbers it cannot have been added to. A sum of four draws closes these gaps.
    source: Mironov 2012, CCS; Holohan & Braghin 2021, ESORICS
    """
    found = torch.empty(count, dtype=torch.float64)
    for start in range(0, count, GAUSSIAN_PIECE):
        size = min(GAUSSIAN_PIECE, count - start)
        total = sum(_standard(size, bits) for _ in range(DRAWS))
        found[start : start + size] = torch.from_numpy(total * (deviation / math.sqrt(DRAWS)))
    return found


def _standard(count: int, bits: RandomBits) -> NDArray[numpy.float64]:
    half = (count + 1) // 2
    radius = numpy.sqrt(-2.0 * numpy.log(uniforms(bits, half)))
    angle = 2.0 * math.pi * uniforms(bits, half)
    return numpy.concatenate([radius * numpy.cos(angle), radius * numpy.sin(angle)])[:count]


DIGITS = 60
INTEGER_PIECE = 1 << 18  # integers per call


def integer_noise(count: int, variance: float, mechanism: str, bits: RandomBits) -> Tensor:
    """Independent integers (count,) of mean 0, in int64.

    Args:
        count: number of integers.
        variance: of Skellam noise; for discrete Gaussian noise, v in the probabilities exp(-k^2 / (2 v)).
        mechanism: "skellam" or "discrete-gaussian".
        bits: random bits.

    Returns:
        The noise. A sum of Skellam noise is Skellam noise with the sum of the variances. For discrete Gaussian noise
        this holds approximately.

    Raises:
        ValueError: the variance is out of range.
    """
    require(
        0 < variance <= (WIDEST * 1.001) ** 2,
        f"the variance of integer noise must be above 0 and at most {WIDEST:.0f}^2, got {variance}: give each device a "
        "share",
    )
    table = _table(mechanism, variance)
    found = torch.empty(count, dtype=torch.int64)
    for start in range(0, count, INTEGER_PIECE):
        size = min(INTEGER_PIECE, count - start)
        found[start : start + size] = torch.from_numpy(table.pick(bits.words(size), bits) - table.largest)
    return found


@dataclass(frozen=True)
class _NoiseTable:
    """Cumulative distribution in 128-bit integers: for each integer from -largest to largest - 1, the end of its draws.

    It is computed in decimal arithmetic of 60 digits and cut at 12 standard deviations. 128 bits select the entry; the
    second 64 are drawn only if the first 64 do not decide. The total variation distance to the exact distribution is
    less than 1e-30, which the accounting includes.
    """

    ends: Sequence[int]  # ascending
    first: NDArray[numpy.uint64]  # their first 64 bits
    largest: int

    def pick(self, words: Words, bits: RandomBits) -> NDArray[numpy.int64]:
        """(n,) number of ends that are at most each draw, given the first 64 bits of the draws."""
        picked = numpy.searchsorted(self.first, words, side="right")
        undecided = numpy.flatnonzero(self.first[picked - 1] == words)
        for place, second in zip(undecided, bits.words(len(undecided)), strict=True):
            picked[place] = bisect_right(self.ends, int(words[place]) << 64 | int(second))
        return picked


@lru_cache(maxsize=8)
def _table(mechanism: str, variance: float) -> _NoiseTable:
    largest = ceil(TAIL * sqrt(variance)) + SPARE
    halves = {SKELLAM: _skellam, DISCRETE_GAUSSIAN: _discrete_gaussian}
    with localcontext(Context(prec=DIGITS)):
        half = halves[mechanism](Decimal(variance), largest)
        weights = [*reversed(half[1:]), *half]
        scale = Decimal(2**128) / sum(weights)
        ends = [min(int(total * scale), 2**128 - 1) for total in accumulate(weights[:-1])]
    return _NoiseTable(ends, numpy.array([end >> 64 for end in ends], dtype=numpy.uint64), largest)


def _discrete_gaussian(variance: Decimal, largest: int) -> Sequence[Decimal]:
    """exp(-k^2 / (2 v)) for k from 0, each from the previous one."""
    ratio, shrink = (-1 / (2 * variance)).exp(), (-1 / variance).exp()
    found = [Decimal(1)]
    for _ in range(largest):
        found.append(found[-1] * ratio)
        ratio *= shrink
    return found


def _skellam(variance: Decimal, largest: int) -> Sequence[Decimal]:
    """I_k(v) up to a factor, for k from 0: I_(k-1) = I_(k+1) + 2 k / v I_k, downward recurrence (Miller)."""
    above, here = Decimal(0), Decimal(1)
    found: list[Decimal] = []
    for place in range(2 * largest, -1, -1):
        if place <= largest:
            found.append(here)
        above, here = here, above + 2 * place / variance * here
    return found[::-1]
