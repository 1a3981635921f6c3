"""Differing tensor: names the first tensor of a model of which the ranks have different hashes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differing_tensor(hashes: Mapping[int, Mapping[str, str]]) -> dict[str, Any] | None:
    """Return the first tensor, in the model's order, with different hashes on different ranks.

    Args:
        hashes: by rank, a hash of each tensor by name.

    Returns:
        Its name, each rank's hash and the number of other differing tensors; None if no tensor differs, or a rank sent
        no hashes.
    """
    names = [
        name for name in next(iter(hashes.values())) if len({tensors.get(name) for tensors in hashes.values()}) > 1
    ]
    if not names or not all(hashes.values()):
        return None
    return {
        "name": names[0],
        "hashes": {str(rank): tensors.get(names[0]) for rank, tensors in hashes.items()},
        "others": len(names) - 1,
    }
