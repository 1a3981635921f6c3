"""Bounded mean: the mean of numbers from users, which does not overflow where a plain sum does."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

import torch
from torch import Tensor


def mean_of(values: Iterable[float]) -> float:
    """The mean of numbers, correctly rounded as by `statistics.fmean`, also where their sum is beyond float64.

    Args:
        values: at least one number; they may be infinite or NaN.

    Returns:
        A finite number where all values are finite; NaN for positive together with negative infinity.
    """
    numbers = [*values]
    try:
        return fmean(numbers)
    except OverflowError:
        scale = _scale(len(numbers))
        return fmean(value / scale for value in numbers) * scale
    except ValueError:  # fsum's answer to infinities of both signs
        return float("nan")


def tensor_mean(stacked: Tensor) -> Tensor:
    """The mean over the first dimension of a float64 or complex128 tensor, finite where all its entries are."""
    mean = stacked.mean(0)
    if mean.isfinite().all():
        return mean
    scale = _scale(len(stacked))
    return torch.where(mean.isfinite(), mean, (stacked / scale).mean(0) * scale)


def _scale(count: int) -> float:
    """A power of two, so that no bit is lost, of at least `count`, so that a sum of scaled numbers fits."""
    return 2.0 ** count.bit_length()
