"""Pairs that are refused where a recipe is written, with the line to write instead."""

from __future__ import annotations

import pytest

from gossamer.algorithms.recipes import validation
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.errors import RecipeError

EF21 = "Feedback(TopK(density=0.01), rule='ef21')"


@pytest.mark.parametrize("recipe", ["EveryStep()", "EveryStep(delay=1)", "EveryStep(accumulate=2)"])
def test_differences_of_gradients_travel_with_every_strategy_of_gradients(recipe: str) -> None:
    assert EF21 in repr(resolve(f"{recipe} + {EF21}"))


APART = [
    f"LocalSGD(period=4) + {EF21}",
    f"PostLocalSGD(period=4, start=10) + {EF21}",
    f"DiLoCo(period=4) + Route({EF21})",
    f"DelayedAveraging(delay=2) + {EF21}",
    f"ParameterServer() + {EF21}",
    f"ParameterServer(push={EF21})",
    f"ParameterServer(pull=Route({EF21}))",
    f"Gossip() + {EF21}",
    f"Gossip('pairwise') + Warmup({EF21}, steps=3)",
]


@pytest.mark.parametrize("recipe", APART)
def test_elsewhere_they_are_refused_with_the_line_to_write(recipe: str) -> None:
    with pytest.raises(RecipeError, match=r"Write EveryStep\(\) \+ Feedback\(TopK\(density=0.01\), rule='ef21'\)"):
        resolve(recipe)


def test_a_rank_that_asks_only_about_momentum_lets_them_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_check_continued", lambda strategy, compressor: None)
    for recipe in APART[:6]:
        resolve(recipe)


@pytest.mark.parametrize(
    "recipe",
    [
        "Gossip() + Warmup(TopK(density=0.01))",
        "ParameterServer(push=Feedback(Warmup(TopK(density=0.01))))",
        "ParameterServer() + Warmup(TopK(density=0.01))",
        "Warmup(TopK(density=0.01, feedback=False))",
    ],
)
def test_a_warm_up_that_nobody_could_follow_is_refused(recipe: str) -> None:
    with pytest.raises(RecipeError, match=r"Write a number of steps: Warmup\(..., steps=500\)"):
        resolve(recipe)


@pytest.mark.parametrize("strategy", ["Gossip()", "Gossip('pairwise')", "ParameterServer()", "AsyncDiLoCo(period=4)"])
def test_densities_that_adapt_are_refused_where_messages_go_to_some_workers(strategy: str) -> None:
    with pytest.raises(RecipeError, match=r"receive all messages\. Write EveryStep\(\) \+ Adaptive\(TopK") as refused:
        resolve(f"{strategy} + Adaptive(TopK(density=0.01))")
    assert "Warmup" not in str(refused.value)


def test_densities_that_adapt_need_no_residual() -> None:
    text = "Adaptive(TopK(density=0.01, feedback=False))"
    assert text in repr(resolve(text))
    assert "Feedback(" not in repr(resolve(text))


@pytest.mark.parametrize("recipe", ["EveryStep()", "LocalSGD(period=4)", "DiLoCo(period=4, outer_momentum=0.0)"])
def test_where_everyone_hears_everything_a_warm_up_needs_no_number(recipe: str) -> None:
    assert "Feedback(Warmup(TopK(density=0.01)))" in repr(resolve(f"{recipe} + Warmup(TopK(density=0.01))"))
