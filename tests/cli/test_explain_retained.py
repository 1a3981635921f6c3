"""Explanations: the retained benefit of a recipe as measured, and by the rounds of a training."""

from __future__ import annotations

import pytest
from support.explaining import run

from gossamer.algorithms.recipes import retained_benefit
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.recipes.retained_benefit import MeasuredShare


def _share(recipe, value, workers=4, spread=0.1, rounds=0):
    return MeasuredShare(
        recipe=recipe,
        task="bytelm",
        optimizer="AdamW",
        workers=workers,
        times_fewer=30,
        rounds=rounds,
        value=value,
        low=value - spread,
        high=value + spread,
    )


def _shares(monkeypatch, *more, **shares):
    found = [*more, *(_share(recipe, value) for recipe, value in shares.items())]
    monkeypatch.setattr(retained_benefit, "measured_shares", lambda: tuple(sorted(found, key=lambda each: -each.value)))


def test_the_measured_retained_benefit_is_shown(monkeypatch):
    _shares(monkeypatch, **{"LocalSGD(period=8)": 0.9})
    said = run("LocalSGD(8)")[1]
    assert "90 % (80 to 100)" in said
    assert "warning" not in said


def test_a_recipe_that_keeps_less_than_half_is_warned_about_with_a_better_one(monkeypatch):
    _shares(monkeypatch, **{"LocalSGD(period=8)": 0.9, "OneBit()": 0.2})
    said = run("OneBit()")[1]
    assert "warning: less than half" in said
    assert "LocalSGD(period=8)" in said


@pytest.mark.parametrize(("workers", "shown"), [(4, 90), (7, 90), (9, 60), (64, 60)])
def test_the_share_of_the_nearest_number_of_workers_is_shown(monkeypatch, workers, shown):
    _shares(monkeypatch, _share("LocalSGD(period=8)", 0.6, workers=16, spread=0.01), **{"LocalSGD(period=8)": 0.9})
    said = run("LocalSGD(8)", "--workers", str(workers))[1]
    assert f"and {4 if shown == 90 else 16} workers:" in said
    assert f"  {shown} % (" in said


def test_recipes_that_were_not_measured_have_no_share(monkeypatch):
    _shares(monkeypatch, **{"LocalSGD(period=8)": 0.9})
    assert "Retained" not in run("LocalSGD(9)")[1]


@pytest.mark.parametrize(
    ("recipe", "shown"), [("DiLoCo(50) + Int8()", True), ("LocalSGD(1)", False), ("Dense()", False)]
)
def test_a_recipe_with_a_period_shows_the_retained_benefit_over_rounds(monkeypatch, recipe, shown):
    _shares(monkeypatch, *(_share("LocalSGD(period=8)", rounds / 1000, rounds=rounds) for rounds in (60, 90, 500)))
    said = run(recipe)[1]
    assert ("by rounds (steps of the training / 50)" in said) is shown
    assert ("  50 to 100     6 to 9 %\n  400 to 800    50 to 50 %" in said) is shown


@pytest.mark.parametrize(
    ("recipe", "steps", "row", "warning"),
    [
        ("LocalSGD(40)", 20_000, "  400 to 800    50 to 50 %    26 to 50   this recipe\n", ""),
        ("LocalSGD(400)", 20_000, "  50 to 100     6 to 9 %      201 to 400   this recipe\n", "write period=40"),
        (
            "LocalSGD(8)",
            500,
            "  50 to 100     6 to 9 %      6 to 10   this recipe\n",
            "write a recipe of every step",
        ),
        ("LocalSGD(50)", 40, "", "the training ends before its first round. write a recipe of every step"),
    ],
)
def test_the_rounds_of_a_training_are_placed_among_the_measured_ones(monkeypatch, recipe, steps, row, warning):
    _shares(monkeypatch, *(_share("LocalSGD(period=8)", rounds / 1000, rounds=rounds) for rounds in (60, 90, 500)))
    said = run(recipe, "--steps", str(steps))[1]
    assert row in said
    assert said.count("this recipe") == bool(row)
    assert said.count("warning") == bool(warning)
    assert warning in said.lower()


def test_the_number_of_steps_changes_nothing_without_periods(monkeypatch):
    _shares(monkeypatch, _share("LocalSGD(period=8)", 0.5, rounds=500))
    assert run("Int8()", "--steps", "1000") == run("Int8()")


def test_measured_shares_are_of_readable_recipes():
    for each in retained_benefit.measured_shares():
        assert retained_benefit.measured_share(resolve(each.recipe, 4), 4) is not None
