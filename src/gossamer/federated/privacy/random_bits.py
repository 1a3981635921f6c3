"""Random bits: bits of the operating system's generator, which nobody can guess, or of a seed, for tests."""

from __future__ import annotations

import os
from typing import Protocol

import numpy
from numpy.typing import NDArray

Words = NDArray[numpy.uint64]


class RandomBits(Protocol):
    """Where noise and coins come from."""

    def words(self, count: int) -> Words:
        """(count,) independent, uniform words of 64 bits."""


class SystemBits(RandomBits):
    """Of the operating system: fit for privacy."""

    def words(self, count: int) -> Words:
        return numpy.frombuffer(os.urandom(8 * count), dtype=numpy.uint64)


class SeededBits(RandomBits):
    """The same for the same seed: for tests only, since who knows the seed can take the noise away."""

    def __init__(self, seed: int) -> None:
        self._generator = numpy.random.Generator(numpy.random.PCG64(seed))

    def words(self, count: int) -> Words:
        return self._generator.integers(0, 2**64, size=count, dtype=numpy.uint64)


def uniforms(bits: RandomBits, count: int) -> NDArray[numpy.float64]:
    """(count,) in (0, 1], in steps of 2^-53."""
    return ((bits.words(count) >> numpy.uint64(11)).astype(numpy.float64) + 1.0) * 2.0**-53
