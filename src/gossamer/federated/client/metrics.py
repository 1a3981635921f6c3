"""Metrics: what user functions report, as plain numbers that fit into any message and record, and their means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import frexp, isfinite
from numbers import Real
from typing import Any

from gossamer.errors import LoopError


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Each as a float: of a number, or of a tensor or an array that holds one. Raises LoopError for anything else."""
    return {name: _plain(name, value) for name, value in metrics.items()}


def _plain(name: str, value: Any) -> float:
    with suppress(RuntimeError, ValueError, OverflowError):
        number = value.item() if hasattr(value, "item") else value
        if isinstance(number, Real):
            return float(number)
    raise LoopError(
        f"The metric {name!r} is {str(value)[:60]}, and messages and records have one number for each metric. Write "
        f'Update(samples=n, metrics={{"{name}": float(value)}}), of the mean where there are several.'
    )


def weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """The mean of numbers; finite where all of them are, however large.

    Args:
        values: at least one number.
        weights: one for each value, 0 or more, not all 0.

    Returns:
        sum(value * weight) / sum(weight). Large values are divided by a power of two first, so that no sum overflows
        and rounding stays the same.
    """
    largest = max(map(abs, values))
    scale = 2.0 ** (frexp(largest)[1] - 1) if largest > 1.0 and isfinite(largest) else 1.0
    total = sum(value / scale * weight for value, weight in zip(values, weights, strict=True))
    return total / sum(weights) * scale
