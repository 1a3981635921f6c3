"""Answers to races of planted curves."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from support.planted_races import Planted, PlantedField

from gossamer.algorithms.recipes.retained_benefit import measured_shares
from gossamer.plan.advise.answer import Answer, Setting, answer, threshold_text
from gossamer.plan.advise.curves import read_target
from gossamer.plan.advise.race import Race
from gossamer.plan.advise.thresholds import LeadRange

DENSE = Planted(step_seconds=1.0)
WINNER = Planted(step_seconds=0.25, efficiency=0.75)


def answered(
    recipes: Mapping[str, Planted], until: str | None = None, budget: float = 8000.0, steps: int | None = None
) -> Answer:
    field = PlantedField({"Dense()": DENSE} | dict(recipes))
    target = read_target(until) if until else None
    race = Race(
        start=field.start,
        baseline="Dense()",
        challengers=list(recipes),
        budget_seconds=budget,
        target=target,
        now=field.now,
    )
    setting = Setting(
        script="my train.py", arguments=["--lr", "1"], workers=4, network="20mbit", target=target, steps=steps
    )
    return answer(race.run(), setting, [LeadRange(of="rate", recipe="Int8()", above=0.0, below=40e6)])


def test_a_winner_is_named_with_gain_cost_and_command() -> None:
    found = answered({"TopK(density=0.01)": WINNER, "Int8()": Planted(step_seconds=0.9)})
    assert found.change
    assert found.use == "use TopK(density=0.01)"
    assert "x as fast to the same loss" in found.gain
    assert found.cost.startswith("+0.")
    assert found.command == "gossamer run --workers 4 --recipe 'TopK(density=0.01)' 'my train.py' --lr 1"
    assert found.would_change == ("rate below 40.0 Mbit/s: Int8()",)


def test_noise_is_no_reason_to_change() -> None:
    found = answered({f"R{place}": DENSE for place in range(4)})
    assert not found.change
    assert found.use.startswith("change nothing")
    assert found.command.endswith("--recipe 'Dense()' 'my train.py' --lr 1")


def test_a_gain_of_a_few_percent_is_no_reason_to_change() -> None:
    found = answered({"R": Planted(step_seconds=0.96, own_noise=1e-3)})
    assert not found.change
    assert "less than 1.1x is not worth another recipe" in found.gain


def test_a_recipe_that_costs_nothing_is_said_to() -> None:
    found = answered({"Int8()": Planted(step_seconds=0.25)})
    assert found.change
    assert "no difference in loss at equal steps beyond noise" in found.cost


def test_a_loss_that_is_lower_is_not_made_up_for() -> None:
    found = answered({"Int8()": Planted(step_seconds=0.25, efficiency=1.3)})
    assert found.change
    assert found.cost.startswith("-0.")
    assert found.cost.endswith("): lower than with Dense()")


def test_a_loss_that_is_higher_is_made_up_for() -> None:
    found = answered({"TopK(density=0.01)": WINNER})
    assert found.cost.startswith("+0.")
    assert found.cost.endswith("included in the gain")


def test_what_is_slower_never_came_there() -> None:
    found = answered({"R": Planted(step_seconds=1.0, efficiency=0.3)})
    assert not found.change
    assert "did not reach" in found.gain


def test_a_target_is_reported_in_seconds() -> None:
    found = answered({"Int8()": WINNER}, "loss<2.0")
    assert "; loss<2 after " in found.gain
    assert ", with Dense() after " in found.gain


def test_a_target_that_nobody_reached_is_reported_with_the_best() -> None:
    found = answered({"Int8()": WINNER}, "loss<0.5")
    (said,) = [each for each in found.remarks if "no recipe reached loss<0.5" in each]
    assert "by Int8()" in said
    assert any("no recipe logged accuracy" in each for each in answered({"Int8()": WINNER}, "accuracy>0.9").remarks)


@pytest.mark.parametrize(
    ("above", "below", "text"),
    [
        (0.0, 1e6, "rate below 1.0 Mbit/s: R"),
        (1e6, 2e6, "rate from 1.0 Mbit/s to 2.0 Mbit/s: R"),
        (1e6, None, "rate above 1.0 Mbit/s: R"),
        (0.0, None, "any rate: R"),
    ],
)
def test_thresholds_as_text(above: float, below: float | None, text: str) -> None:
    assert threshold_text(LeadRange(of="rate", recipe="R", above=above, below=below)) == text


def test_measured_retained_benefit_of_the_winner_is_shown() -> None:
    (known,) = [each for each in measured_shares() if each.recipe == "Float4()" and each.task == "bytelm-57k-b2"]
    found = answered({"Float4()": WINNER})
    assert f"Float4() retains {known}" in found.remarks[-1]
    assert not any("retains" in remark for remark in answered({"TopK(density=0.01)": WINNER}).remarks)


@pytest.mark.parametrize(
    ("period", "steps", "said"),
    [
        (20, 20_000, "20,000 steps have 1,000 rounds of 20 steps"),
        (50, 20_000, "For more, write period=40"),
        (50, 900, "write a recipe of every step"),
        (50, 49, "49 steps end before the first round of 50"),
        (1, 20_000, None),
        (50, None, None),
    ],
)
def test_rounds_of_the_whole_training_are_noted(period: int, steps: int | None, said: str | None) -> None:
    remarks = answered({f"LocalSGD(period={period}) + TwoBit()": WINNER}, steps=steps).remarks
    assert any(said in remark for remark in remarks) if said else not remarks
