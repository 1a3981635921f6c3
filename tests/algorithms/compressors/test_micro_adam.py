"""MicroAdam: what is sent. How parameters move by it: tests/moments/test_window.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laws.laws import LAYOUT, Group, check_conservation
from support.aggregations import priced_bytes

from gossamer.algorithms.compressors import Feedback, MicroAdam, OneBit, Route, Sharded, TopK
from gossamer.algorithms.recipes.recipe import resolve


def test_gradients_travel_as_they_would_without_it() -> None:
    inner = Feedback(TopK(density=0.1))
    ours, plain = Group(MicroAdam(inner=inner), 3), Group(inner, 3)
    for _ in range(5):
        gradients = ours.gradients()
        assert torch.equal(ours.aggregate(gradients)[0].mean, plain.aggregate(gradients)[0].mean)


def test_nothing_is_lost() -> None:
    check_conservation(MicroAdam(inner=Feedback(TopK(density=0.1))), 3)
    with pytest.raises(AssertionError):
        check_conservation(MicroAdam(inner=TopK(density=0.1)), 3)


@pytest.mark.parametrize("world", [2, 8])
def test_bytes_are_the_inner_compressors(world: int) -> None:
    inner = Feedback(TopK(density=0.1))
    assert priced_bytes(MicroAdam(inner=inner), world, LAYOUT) == priced_bytes(inner, world, LAYOUT)


def test_a_recipe_feeds_back_and_shards_the_inner_compressor() -> None:
    assert resolve("MicroAdam()").compressor == Route(MicroAdam(inner=Feedback(TopK(density=0.01))))
    assert resolve("MicroAdam(OneBit())", 8).compressor == Route(MicroAdam(inner=Feedback(Sharded(OneBit()))))


@pytest.mark.parametrize(
    ("arguments", "wrong"), [({"window": 0}, r"MicroAdam\(window=10\)"), ({"clip": 0.0}, r"MicroAdam\(clip=1.0\)")]
)
def test_refusals(arguments: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        MicroAdam(**arguments)
