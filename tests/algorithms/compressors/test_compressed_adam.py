"""Compressed Adam: what is sent of the momentum. How parameters move by it: tests/moments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laws.formulas import ring
from laws.laws import LAYOUT
from support.aggregations import priced_bytes

from gossamer.algorithms.compressors import CompressedAdam, Feedback, OneBit, OneBitAdam, Route, Sharded, TopK
from gossamer.algorithms.compressors.compressed_adam import VARIANCES
from gossamer.algorithms.compressors.ownership import Ownership, UpdateRule
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.layout import Slot
from gossamer.train.moments.take_over import RULES

SLOT = Slot("p", (4, 4), 0, (4, 1))


def test_every_rule_can_be_followed() -> None:
    assert set(RULES) == set(UpdateRule)
    assert set(VARIANCES.values()) < set(RULES)


def test_one_bit_adam_is_a_case_of_it() -> None:
    general = CompressedAdam(OneBit(), variance="frozen", warmup=7)
    assert general.owns_momentum(SLOT) == OneBitAdam(warmup=7).owns_momentum(SLOT)
    assert general.owns_momentum(SLOT) == Ownership(
        optimizers=(torch.optim.Adam,), rule=UpdateRule.FROZEN_VARIANCE, start=7
    )


@pytest.mark.parametrize("world", [2, 3, 8])
def test_bytes_of_both_phases(world: int) -> None:
    inner = Feedback(TopK(density=0.1))
    assert priced_bytes(CompressedAdam(inner=inner), world, LAYOUT) == priced_bytes(inner, world, LAYOUT)
    warmed = CompressedAdam(inner=inner, warmup=3)
    assert priced_bytes(warmed, world, LAYOUT, 2) == ring(world, 4 * LAYOUT.numel)
    assert priced_bytes(warmed, world, LAYOUT, 3) == priced_bytes(inner, world, LAYOUT)


def test_a_recipe_feeds_back_and_shards_the_inner_compressor() -> None:
    assert resolve("CompressedAdam()").compressor == Route(CompressedAdam(inner=Feedback(TopK(density=0.01))))
    assert resolve("CompressedAdam(OneBit())", 8).compressor == Route(CompressedAdam(Feedback(Sharded(OneBit()))))


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"variance": "frosty"}, "'frozen', 'rows', 'momentum', 'agreed', got 'frosty'"),
        ({"variance": "frozen"}, r'CompressedAdam\(variance="frozen", warmup=1000\), or variance="momentum"'),
        ({"variance": "rows"}, r'CompressedAdam\(variance="rows", warmup=1000\)'),
        ({"warmup": -1}, "warmup must be a number of steps"),
        ({"clip": -1.0}, r"CompressedAdam\(clip=1.0\)"),
    ],
)
def test_refusals(arguments: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        CompressedAdam(**arguments)
