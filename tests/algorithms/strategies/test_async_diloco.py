"""AsyncDiLoCo: its arguments, and the rules of a merge."""

from __future__ import annotations

from typing import Any

import pytest

import gossamer
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.strategies.async_diloco import AsyncDiLoCo
from gossamer.errors import RecipeError


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"period": 0}, "period"),
        ({"period": 3, "quorum": 0}, "quorum"),
        ({"period": 3, "grace": -1.0}, "grace"),
        ({"period": 3, "grace": float("inf")}, "grace"),
        ({"period": 3, "outer_momentum": 1.0}, "outer_momentum"),
        ({"period": 3, "outer_learning_rate": -1.0}, "outer_learning_rate"),
        ({"period": 3, "fragments": 4}, "fragments"),
        ({"period": 3, "weighting": "tokens"}, "weighting"),
        ({"period": 3, "shards": 0}, "shards"),
        ({"period": 3, "pull": gossamer.Feedback(gossamer.Int8())}, r"pull=Int8"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        gossamer.AsyncDiLoCo(**arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("AsyncDiLoCo(period=3) + DGC(0.01)", "momentum"),
        ("AsyncDiLoCo(period=3) + Ring()", "Omit it"),
    ],
)
def test_terms_that_servers_do_not_support_are_refused(text: str, expected: str) -> None:
    with pytest.raises(RecipeError, match=expected):
        resolve(text)


def test_the_weight_is_samples_times_samples_per_step() -> None:
    assert AsyncDiLoCo(period=24).weight(100.0, 10) == 1000.0
    assert AsyncDiLoCo(period=24, weighting="samples").weight(100.0, 10) == 100.0
    assert AsyncDiLoCo(period=24).weight(0.0, 0) == 0.0


def test_the_share_of_a_merge_is_the_part_of_the_present_workers() -> None:
    strategy = AsyncDiLoCo(period=24)
    assert strategy.merge([24.0], [0], present=4) == ([1.0], 0.25)
    assert strategy.merge([24.0, 12.0, 24.0, 24.0], [0] * 4, present=4) == ([1.0, 0.5, 1.0, 1.0], 1.0)
    assert strategy.merge([], [], present=4) == ([], 0.0)


def test_a_late_contribution_is_reduced_and_the_others_do_not_grow() -> None:
    strategy = AsyncDiLoCo(period=24)
    assert [strategy.factor(age, 0.25) for age in (0, 3, 4, 12)] == [1.0, 1.0, 2**-0.5, 0.5]
    assert strategy.merge([24.0], [12], present=4) == ([1.0 * 0.5], 0.25 * 0.5)
    weights, factor = strategy.merge([1.0, 1.0], [0, 3], present=2)
    fresh, late = (factor * weight / sum(weights) for weight in weights)
    assert (fresh, late) == (pytest.approx(0.5), pytest.approx(0.25))


def test_a_quorum_is_bounded_by_the_present_workers() -> None:
    strategy = AsyncDiLoCo(period=24, quorum=3)
    assert [strategy.needed(present) for present in (5, 3, 2, 1, 0)] == [3, 3, 2, 1, 1]
