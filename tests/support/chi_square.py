"""Chi-square of bytes: how far they are from uniform."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def byte_z(numbers: npt.NDArray[Any]) -> float:
    """The largest z-score, over the bytes of a number by place and all of them together, of chi-square over 256."""
    planes = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, numbers.itemsize)
    return max(_z(each) for each in (planes.reshape(-1), *planes.T))


def _z(values: npt.NDArray[np.uint8]) -> float:
    counts = np.bincount(values, minlength=256)
    expected = len(values) / 256
    return float((((counts - expected) ** 2).sum() / expected - 255) / (2 * 255) ** 0.5)
