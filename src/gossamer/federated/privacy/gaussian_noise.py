"""Gaussian noise: draws Gaussian numbers of random bits, by Box and Muller's formula, four for each.

Floating-point numbers have gaps, and a single draw of such a formula can only land on some of them: who sees the result
can tell which numbers it cannot have been added to. A sum of four draws closes the gaps.
source: Mironov 2012, CCS; Holohan & Braghin 2021, ESORICS
"""

from __future__ import annotations

import math

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.federated.privacy.random_bits import RandomBits, uniforms

DRAWS = 4
PIECE = 1 << 17  # numbers at once, so that memory stays small


def gaussian(count: int, deviation: float, bits: RandomBits) -> Tensor:
    """(count,) independent Gaussian numbers of mean 0 and such a standard deviation, in float64."""
    found = torch.empty(count, dtype=torch.float64)
    for start in range(0, count, PIECE):
        size = min(PIECE, count - start)
        total = sum(_standard(size, bits) for _ in range(DRAWS))
        found[start : start + size] = torch.from_numpy(total * (deviation / math.sqrt(DRAWS)))
    return found


def _standard(count: int, bits: RandomBits) -> NDArray[numpy.float64]:
    half = (count + 1) // 2
    radius = numpy.sqrt(-2.0 * numpy.log(uniforms(bits, half)))
    angle = 2.0 * math.pi * uniforms(bits, half)
    return numpy.concatenate([radius * numpy.cos(angle), radius * numpy.sin(angle)])[:count]
