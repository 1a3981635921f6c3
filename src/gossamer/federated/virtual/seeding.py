"""Seeding: seeds torch, random and numpy for every device and round, so that the order of devices does not matter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch


def seed_everything(seed: int) -> None:
    """Seed the global generators, which a user's function may draw from."""
    torch.manual_seed(seed % 2**63)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Leave the global generators afterwards as they were before."""
    kept = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        numpy.random.set_state(kept[2])
