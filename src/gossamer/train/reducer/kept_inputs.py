"""Kept inputs: what a reduction was given, from which it can be made again in another group."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gossamer.train.reducer.bucket import Bucket


class KeptInputs:
    """What went in, by the place in a reduction: where it lay, while nothing is written there; else as a copy, in
    memory that serves one reduction after the other.

    buckets: those whose means are written elsewhere from now on, so that their inputs stay where they are.
    """

    def __init__(self, buckets: Iterable[Bucket] = ()) -> None:
        for bucket in buckets:
            bucket.keep_inputs()
        self._copies: dict[int, Tensor] = {}
        self._copied: set[int] = set()  # places of the reduction under way
        self._there: set[int] = set()  # likewise, where what went in still lies

    def clear(self) -> None:
        """Another reduction begins."""
        self._copied.clear()
        self._there.clear()

    def trust(self, place: int) -> None:
        """What goes in at a place stays where it is: whoever is going to write there has to `keep` it before."""
        self._there.add(place)

    def keep(self, place: int, flat: Tensor) -> None:
        """Copy what goes in at a place; the first time, since it may be overwritten by the mean."""
        self._there.discard(place)
        if self.restores(place, flat):
            return
        copy = self._copies.get(place)
        if copy is None or copy.shape != flat.shape or copy.dtype != flat.dtype:
            copy = self._copies[place] = torch.empty_like(flat)
        copy.copy_(flat)
        self._copied.add(place)

    def restores(self, place: int, flat: Tensor) -> bool:
        """Put back what went in at a place, if it was kept; whether it was."""
        if place in self._copied:
            flat.copy_(self._copies[place])
        return place in self._copied or place in self._there
