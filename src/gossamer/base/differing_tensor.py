"""Differing tensor: names the first tensor of a model of which the ranks have different hashes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differing_tensor(told: Mapping[int, Mapping[str, str]]) -> dict[str, Any] | None:
    """The first tensor, in the model's order, of which not all ranks have the same hash.

    Args:
        told: by rank, a hash of each tensor by name.

    Returns:
        Its name, each rank's hash and how many others differ; None where none does, or a rank told no hashes.
    """
    names = [name for name in next(iter(told.values())) if len({tensors.get(name) for tensors in told.values()}) > 1]
    if not names or not all(told.values()):
        return None
    return {
        "name": names[0],
        "hashes": {str(rank): tensors.get(names[0]) for rank, tensors in told.items()},
        "others": len(names) - 1,
    }
