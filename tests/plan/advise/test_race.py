"""Races of planted curves: who wins is known, and what may be spent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf, sqrt

import pytest
from support.nightly import nightly
from support.planted_races import Planted, PlantedField, PlantedProgress

from gossamer.plan.advise.curves import AgainstBaseline
from gossamer.plan.advise.race import (
    FINALISTS,
    FIRST_STEPS,
    Contender,
    Race,
    RaceError,
    RaceResult,
    dear_and_behind,
    kept_of,
)

DENSE = Planted(step_seconds=1.0)
BUDGET = 20_000.0


def _field(count: int, winner: Planted | None = None) -> dict[str, Planted]:
    """Dense and recipes that are worth from 0.5 to 2 of it, among them a planted winner."""
    recipes = {"Dense()": DENSE}
    for place in range(count):
        worth = 0.5 + 1.5 * place / count
        recipes[f"R{place}"] = Planted(step_seconds=0.5, efficiency=worth / 2)
    return recipes | ({"W": winner} if winner else {})


def _run(recipes: Mapping[str, Planted], seed: int = 0, budget: float = BUDGET) -> tuple[RaceResult, PlantedField]:
    field = PlantedField(recipes, seed)
    race = Race(
        start=field.start,
        baseline="Dense()",
        challengers=[name for name in recipes if name != "Dense()"],
        budget_seconds=budget,
        now=field.now,
    )
    return race.run(), field


WINNER = Planted(step_seconds=0.25, efficiency=0.75)


DEAR_ONE = Planted(step_seconds=0.5, efficiency=0.2, cost=30.0)


@pytest.mark.parametrize("seed", [0, *nightly(1, 2)])
def test_minutes_go_where_the_answer_is_decided(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A recipe that is behind, and of which a virtual second takes this machine as long as thirty of others, goes as
    soon as that is seen. The twin that prices virtual seconds only races it to the first halving, and the winner comes
    less far."""
    recipes = _field(7, WINNER) | {"dear": DEAR_ONE}
    found, _ = _run(recipes, seed)
    monkeypatch.setattr("gossamer.plan.advise.race.DEAR", inf)
    twin, _ = _run(recipes, seed)
    dear, waited_for = (next(each for each in race.contenders if each.recipe == "dear") for race in (found, twin))
    assert dear.out is not None
    assert "slow on this machine" in dear.out
    assert dear.spent < 0.5 * waited_for.spent
    assert found.contenders[1].recipe == twin.contenders[1].recipe == "W"
    assert found.baseline.steps > twin.baseline.steps


@pytest.mark.parametrize("seed", [0, *nightly(1, 2)])
def test_a_recipe_that_is_dear_and_ahead_is_raced_to_the_end(seed: int) -> None:
    found, _ = _run(_field(7, replace(WINNER, cost=30.0)), seed, 3 * BUDGET)
    assert found.contenders[1].recipe == "W"


@pytest.mark.parametrize("seed", [0, 1, *nightly(2, 3, 4)])
def test_the_planted_winner_stays(seed: int) -> None:
    found, _ = _run(_field(15, WINNER), seed)
    assert found.contenders[1].recipe == "W"
    assert [len(rung.names) - 1 - len(rung.out) for rung in found.rungs] == [8, 4, 2, 2]


def test_the_speedup_of_the_winner_is_about_what_was_planted() -> None:
    found, _ = _run(_field(15, WINNER))
    winner = next(each for each in found.contenders[1:] if each.learning_rate_factor == 1)
    assert winner.against is not None
    assert winner.against.speedup.low <= WINNER.speedup_over(DENSE) <= winner.against.speedup.high
    assert winner.against.speedup.low > 2


def test_where_the_worse_half_continues_the_planted_winner_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Race._place
    monkeypatch.setattr(Race, "_place", lambda self, each: tuple(-part for part in place(self, each)))
    found, _ = _run(_field(15, WINNER))
    assert found.contenders[1].recipe != "W"


def test_noise_alone_wins_no_more_often_than_said() -> None:
    """Sixteen recipes that are Dense() but for their own noise: whose speedup is surely above one?"""
    recipes = {"Dense()": DENSE} | {f"R{place}": DENSE for place in range(16)}
    trials = 24
    surely = seemingly = 0
    for seed in range(trials):
        found, _ = _run(recipes, seed, 8_000.0)
        best = found.contenders[1]
        if best.against is not None:
            surely += best.against.speedup.low > 1
            seemingly += best.against.speedup.value > 1
    assert surely <= 0.05 * trials + 3 * sqrt(trials * 0.05 * 0.95)
    assert seemingly > 0.3 * trials  # as often would a race that knows no interval find something in noise


@pytest.mark.parametrize("budget", [3_000.0, 12_000.0, 40_000.0])
def test_the_budget_is_kept(budget: float) -> None:
    found, field = _run(_field(15, WINNER), 0, budget)
    assert field.ledger.steps <= 1.1 * budget
    assert field.ledger.steps >= 0.3 * budget or found.baseline.ended


def test_a_budget_of_steps_is_kept() -> None:
    field = PlantedField(_field(15, WINNER))
    names = [name for name in field.recipes if name != "Dense()"]
    Race(
        start=field.start, baseline="Dense()", challengers=names, budget_seconds=1e9, most_steps=8000, now=lambda: 0.0
    ).run()
    assert 2000 <= field.ledger.steps <= 8800


def test_jobs_are_closed_as_they_go_out_and_in_the_end() -> None:
    _, field = _run(_field(15, WINNER))
    assert field.ledger.open == set()
    assert field.ledger.most_open == 17


def test_the_baseline_is_tuned_as_the_winner_is() -> None:
    found, _ = _run(_field(3, WINNER), budget=60_000.0)
    tried = {(each.recipe, each.learning_rate_factor) for each in found.contenders}
    assert {("Dense()", 0.5), ("Dense()", 2.0), ("W", 0.5), ("W", 2.0)} <= tried


def test_a_winner_that_wants_another_rate_gets_it() -> None:
    found, _ = _run(
        {"Dense()": DENSE, "W": Planted(step_seconds=0.25, efficiency=0.75, best_factor=0.5)}, budget=60_000.0
    )
    assert (found.contenders[1].recipe, found.contenders[1].learning_rate_factor) == ("W", 0.5)


def test_others_are_compared_with_the_baseline_at_its_best_rate() -> None:
    found, _ = _run({"Dense()": replace(DENSE, best_factor=2.0), "W": WINNER}, budget=30_000.0)
    assert (found.baseline.learning_rate_factor, found.reference.learning_rate_factor) == (1.0, 2.0)
    assert _run({"Dense()": DENSE, "W": WINNER}, budget=30_000.0)[0].reference.learning_rate_factor == 1.0


@pytest.mark.parametrize("budget", [600.0, 3000.0])
def test_a_baseline_with_the_longest_steps_runs_ahead_so_that_it_can_be_compared(budget: float) -> None:
    """Sixty steps of the winner in one of Dense()'s: of equal seconds there are too few to tell anything."""
    recipes = {"Dense()": DENSE, "W": Planted(step_seconds=1 / 60, efficiency=0.8)}
    truth, covered = recipes["W"].speedup_over(DENSE), 0
    for seed in range(10):
        found, field = _run(recipes, seed, budget=budget)
        assert found.seconds < 20 < found.baseline.steps
        assert len([each for each in found.contenders if each.learning_rate_factor != 1]) == 4  # there was time for it
        assert field.now() <= 1.15 * budget
        best = next(each for each in found.contenders[1:] if each.recipe == "W" and each.learning_rate_factor == 1)
        assert best.against is not None
        assert best.against.speedup.low > 1
        covered += best.against.speedup.low <= truth <= best.against.speedup.high
    assert covered >= 9  # of intervals that say 99 %


@pytest.mark.parametrize("seed", [0, 1, *nightly(2, 3, 4)])
def test_a_budget_in_which_the_baseline_makes_a_few_steps_at_equal_seconds_goes_to_what_is_compared(seed: int) -> None:
    """Twenty-five steps of a contender in one of Dense()'s, and 1,200 steps in all: a slow network, a large model."""
    recipes = {"Dense()": replace(DENSE, step_seconds=5.0)}
    recipes |= {f"R{place}": Planted(step_seconds=0.2, efficiency=0.4 + 0.02 * place) for place in range(14)}
    recipes |= {"W": Planted(step_seconds=0.2, efficiency=0.8), "A": Planted(step_seconds=1.2, efficiency=1.2)}
    found, field = _run(recipes, seed, budget=1200.0)
    best = next(each for each in found.contenders[1:] if each.learning_rate_factor == 1 and each.against is not None)
    assert best.steps >= 120
    assert best.steps / 3 <= found.baseline.steps <= best.steps  # no further than it is looked at
    assert field.ledger.steps <= 1.15 * 1200
    assert best.against is not None
    truth = recipes[best.recipe].speedup_over(recipes["Dense()"])
    assert 1 < best.against.speedup.low <= truth <= best.against.speedup.high


def _of_the_slowest_line(seed: int) -> AgainstBaseline:
    """The best of a race in which no second step of Dense() is affordable: two hundred of another recipe's in one."""
    recipes = {"Dense()": replace(DENSE, step_seconds=40.0)}
    recipes |= {f"R{place}": Planted(step_seconds=0.2, efficiency=0.4 + 0.02 * place) for place in range(5)}
    found, _ = _run(recipes | {"W": Planted(step_seconds=0.2, efficiency=0.8)}, seed, budget=1200.0)
    best = next(each for each in found.contenders[1:] if each.learning_rate_factor == 1)
    assert best.against is not None
    return best.against


@pytest.mark.parametrize("seed", [0, *nightly(1, 2)])
def test_where_no_second_step_of_the_baseline_is_affordable_it_keeps_up_nevertheless(seed: int) -> None:
    assert _of_the_slowest_line(seed).speedup.low > 1


def test_the_mutant_in_which_it_does_not_can_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Race, "_keep_up", lambda self, first: None)
    assert _of_the_slowest_line(0).speedup.low == 0


def test_a_baseline_that_ran_ahead_is_tuned_as_far_ahead() -> None:
    """Else the winner alone would gain by its rate: Dense()'s better one makes few steps within the race's seconds."""
    winner = Planted(step_seconds=1 / 60, efficiency=0.8, best_factor=2.0)
    found, _ = _run({"Dense()": replace(DENSE, best_factor=2.0), "W": winner}, budget=6000.0)
    assert found.seconds < found.baseline.seconds
    assert found.reference.learning_rate_factor == 2.0
    assert found.reference.steps >= found.baseline.steps >= 64


def test_one_that_fails_goes_out_with_its_reason() -> None:
    found, _ = _run(_field(3, Planted(step_seconds=0.25, fails_at=9)))
    failed = next(each for each in found.contenders if each.recipe == "W")
    assert failed.out == "failed: loss is nan at step 9"
    assert found.contenders[1].recipe == "R2"


def test_a_baseline_that_fails_is_an_error() -> None:
    with pytest.raises(RaceError, match=r"the baseline, failed after 19 steps.*nan at step 20"):
        _run({"Dense()": Planted(step_seconds=1.0, fails_at=20), "W": WINNER})


def test_a_script_that_ends_ends_the_race() -> None:
    found, _ = _run({"Dense()": DENSE, "W": Planted(step_seconds=0.25, ends_at=100)})
    assert found.seconds == 25.0
    assert any("ended after 25 virtual seconds" in each for each in found.remarks)


def test_few_steps_are_reported() -> None:
    found, _ = _run({"Dense()": DENSE, "W": WINNER}, budget=20.0)
    assert any("made only" in each for each in found.remarks)


def test_no_more_take_part_than_the_budget_affords() -> None:
    found, field = _run(_field(15, WINNER), budget=600.0)
    raced = [each for each in found.contenders[1:] if each.learning_rate_factor == 1 and each.steps]
    assert 2 <= len(raced) < 15
    assert field.ledger.steps <= 1.15 * 600
    assert any("recipes were not in the race" in each for each in found.remarks)
    assert all(each.steps >= FIRST_STEPS for each in raced)


def test_without_a_loss_it_explains_how_to_log_one() -> None:
    class Silent:
        def advance(self, *, steps: int | None = None, seconds: float | None = None) -> PlantedProgress:
            return PlantedProgress(1, 1.0, {}, 0.0, False, None, "")

        def close(self) -> None:
            """Nothing is open."""

    with pytest.raises(RaceError, match=r"session\.log\(loss=loss\.item\(\)\)"):
        Race(start=lambda recipe, factor: Silent(), baseline="Dense()", challengers=["W"], budget_seconds=1.0).run()


def _halving_keeps(seed: int, count: int, margin: float) -> bool:
    winner = Planted(step_seconds=0.5, efficiency=margin * 0.5 * (0.5 + 1.5 * (count - 1) / count))
    found, _ = _run(_field(count, winner), seed, 12_000.0)
    return any(each.recipe == "W" for each in found.contenders[1 : 1 + FINALISTS])


def test_a_winner_by_a_tenth_is_among_the_last_two_in_nine_of_ten_races() -> None:
    assert sum(_halving_keeps(seed, 15, 1.1) for seed in range(20)) >= 18


# -- elimination -------------------------------------------------------------------------------------------------------


def field(*paces: float, steps: int = FIRST_STEPS):
    """The best first, and what a virtual second of each takes."""
    ranked = [Contender(recipe=f"R{place}", steps=steps) for place in range(len(paces))]
    return ranked, dict(zip((each.recipe for each in ranked), paces, strict=True))


def leaves(*paces: float, steps: int = FIRST_STEPS) -> str | None:
    ranked, by_name = field(*paces, steps=steps)
    found = dear_and_behind(ranked, lambda each: by_name[each.recipe])
    return None if found is None else found.recipe


def test_the_dearest_of_those_behind_goes() -> None:
    assert leaves(1.0, 1.0, 1.0, 1.0, 10.0, 20.0) == "R5"


def test_a_recipe_that_is_dear_and_ahead_stays() -> None:
    assert leaves(20.0, 10.0, 1.0, 1.0, 1.0, 1.0) is None


def test_a_recipe_that_takes_an_even_part_waits_for_the_halving() -> None:
    assert leaves(1.0, 1.0, 1.0, 1.0, 2.0, 2.0) is None


def test_a_recipe_that_could_not_be_judged_stays() -> None:
    assert leaves(1.0, 1.0, 1.0, 1.0, 1.0, 20.0, steps=FIRST_STEPS - 1) is None


def test_finalists_stay_whatever_they_cost() -> None:
    assert leaves(1.0, 100.0) is None
    assert leaves() is None
    assert [kept_of(count) for count in (16, 9, 4, 2, 1)] == [8, 5, 2, 2, 2]
