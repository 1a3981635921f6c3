"""Reproducible random bits for tests of privacy: in a real run, an adversary with the seed could subtract the noise."""

from __future__ import annotations

import numpy

from gossamer.federated.privacy.noise_sampling import RandomBits, Words


class SeededBits(RandomBits):
    def __init__(self, seed: int) -> None:
        self._generator = numpy.random.Generator(numpy.random.PCG64(seed))

    def words(self, count: int) -> Words:
        return self._generator.integers(0, 2**64, size=count, dtype=numpy.uint64)
