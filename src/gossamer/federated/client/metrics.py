"""Metrics: what a user's function tells of its work, as plain numbers that fit into any message and record."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
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
