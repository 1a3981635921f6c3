"""Addressed random numbers: the same address gives the same draws."""

import numpy as np
import pytest

import gossamer
from gossamer.base import rng


def test_a_number_from_numpy_addresses_the_same_draws() -> None:
    assert rng.address("shard", np.int64(3), 0) == rng.address("shard", 3, 0)
    world = gossamer.init()
    assert list(world.shard(range(50), seed=np.int64(3))) == list(world.shard(range(50), seed=3))


@pytest.mark.parametrize("other", ["3", 3.0, True, None, np.float64(3)])
def test_the_kind_of_a_part_belongs_to_the_address(other: object) -> None:
    assert rng.address(other) not in (rng.address(3), rng.address(1))
