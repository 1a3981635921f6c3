"""Selection: which of the devices that are there train next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from gossamer.core import rng


class SelectionPolicy(Protocol):
    """Chooses devices; the same for the same seed and the same devices."""

    @property
    def draws_each(self) -> bool:
        """Whether each device is drawn by itself, so that whoever is about to ask is to be waited for."""
        return False

    def choose(self, available: Sequence[int], count: int, index: int) -> list[int]:
        """`count` of `available`, which ascend and are at least as many."""


@dataclass(frozen=True)
class Uniform(SelectionPolicy):
    """Every device is as likely as any other."""

    seed: int = 0

    def choose(self, available: Sequence[int], count: int, index: int) -> list[int]:
        return sorted(Random(rng.address(self.seed, "selection", index)).sample(available, count))
