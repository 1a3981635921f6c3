"""Kept inputs: copies of what a reduction was given, from which it can be made again in another group."""

from __future__ import annotations

import torch
from torch import Tensor


class KeptInputs:
    """Copies by the place in a reduction, in memory that serves one reduction after the other."""

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}
        self._held: set[int] = set()  # places of the reduction under way

    def clear(self) -> None:
        """Another reduction begins."""
        self._held.clear()

    def keep(self, place: int, flat: Tensor) -> None:
        """Copy what goes in at a place; the first time, since it may be overwritten by the mean."""
        if self.restores(place, flat):
            return
        copy = self._copies.get(place)
        if copy is None or copy.shape != flat.shape or copy.dtype != flat.dtype:
            copy = self._copies[place] = torch.empty_like(flat)
        copy.copy_(flat)
        self._held.add(place)

    def restores(self, place: int, flat: Tensor) -> bool:
        """Put back what went in at a place, if it was kept; whether it was."""
        if place not in self._held:
            return False
        flat.copy_(self._copies[place])
        return True
