"""The ladder and its costs: real recipes, exact bytes, and what a user closes stays closed."""

import re
from dataclasses import replace
from math import exp

import pytest
import torch
from support.paths import ROOT
from support.virtual_ladder import MODEL, WORKERS, ladder
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from gossamer.algorithms.recipes.auto import Auto
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.recipes.retained_benefit import averaging_period, low_rounds_remark
from gossamer.train.auto.decision import ladder_text
from gossamer.train.auto.ladder import RUNGS, admitted, is_adaptive
from gossamer.train.auto.measurement import Measurement, StepSeconds, common_steps
from gossamer.train.auto.rung_cost import rung_costs
from gossamer.train.traffic.traffic import estimate_traffic

LOCAL_STEPS = "LocalSGD(period=8) + Int8()"
DILOCO = "DiLoCo(period=20, outer_learning_rate=1.0, outer_momentum=0.5) + Float4()"
ONE_BIT = "LocalSGD(period=4, optimizer_state='align') + OneBit()"
ONE_BIT_SELDOM = "DiLoCo(period=16, outer_learning_rate=1.5, outer_momentum=0.0, optimizer_state='align') + OneBit()"
PAGE = (ROOT / "docs/benchmarks/recipes.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_every_rung_is_a_recipe_whose_workers_move_in_step(rung) -> None:
    recipe = resolve(rung.name, 4)
    assert recipe == rung.recipe(4)
    assert all(stage.in_lock_step for stage in recipe.strategy.stages)
    assert recipe.strategy.caution(recipe.compressor) is None


def test_each_rung_sends_less_than_the_ones_before_or_needs_fewer_steps() -> None:
    """Else nothing would speak for it."""
    costs = rung_costs(RUNGS, MODEL, WORKERS, adaptive=True)
    for place, cost in enumerate(costs):
        assert not any(
            other.bytes_sent <= cost.bytes_sent and other.steps <= cost.steps and other.trips <= cost.trips
            for other in costs[:place]
        )


@pytest.mark.parametrize("adaptive", [True, False])
def test_bytes_are_those_of_the_estimate(adaptive: bool) -> None:
    for rung, cost in zip(RUNGS, rung_costs(RUNGS, MODEL, WORKERS, adaptive=adaptive), strict=True):
        assert cost.bytes_sent == estimate_traffic(rung.recipe(WORKERS), MODEL, workers=WORKERS).bytes_sent
        assert cost.steps == (rung.steps_adaptive if adaptive else rung.steps_sgd)


def test_local_steps_communicate_once_in_a_period() -> None:
    dense, *_, local = ladder()
    assert (dense.period, local.period) == (1, 20)
    assert local.trips * 20 == pytest.approx(4.0)  # a poll, and Float4's two exchanges of three buckets, two at once
    assert local.local
    assert not dense.local


def test_buffers_are_messages_of_every_step_and_of_every_merge() -> None:
    """Eighteen of BatchNorm's: a step in lock step broadcasts each, a merge averages all at once."""
    buffers = [64, 64, 8] * 6
    plain, moving = (rung_costs(RUNGS, MODEL, WORKERS, adaptive=False, buffers=given) for given in ([], buffers))
    model = replace(MODEL, buffer_bytes=sum(buffers))
    for rung, without, cost in zip(RUNGS, plain, moving, strict=True):
        messages = 1 if cost.local else len(buffers)
        assert (cost.trips - without.trips) * cost.period == pytest.approx(2 * messages)
        if not cost.local:
            assert cost.bytes_sent == estimate_traffic(rung.recipe(WORKERS), model, workers=WORKERS).bytes_sent
        assert cost.bytes_sent > without.bytes_sent


def test_what_the_user_closes_is_closed() -> None:
    assert [rung.name for rung in admitted(Auto(most_steps=1.0), adaptive=True)] == [rung.name for rung in RUNGS[:3]]
    assert admitted(Auto(local_steps=False, steps=20_000), adaptive=True) == RUNGS[:6]
    assert admitted(Auto(steps=20_000), adaptive=True) == RUNGS


@pytest.mark.parametrize(
    ("steps", "local"),
    [
        (300, []),
        (500, [LOCAL_STEPS]),
        (None, [LOCAL_STEPS, DILOCO]),
        (2_000, [LOCAL_STEPS, ONE_BIT, DILOCO]),
        (8_000, [LOCAL_STEPS, ONE_BIT, DILOCO, ONE_BIT_SELDOM]),
    ],
)
def test_a_recipe_of_local_steps_needs_a_training_with_enough_rounds(steps: int | None, local: list[str]) -> None:
    names = [rung.name for rung in admitted(Auto(steps=steps), adaptive=True)]
    assert names[6:] == local
    assert "OneBit()" not in "".join(rung.name for rung in admitted(Auto(steps=steps), adaptive=False))


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_with_its_fewest_steps_a_rung_is_not_known_to_retain_less_than_half(rung) -> None:
    recipe = rung.recipe(WORKERS)
    assert low_rounds_remark(recipe, rung.least_steps) is None
    if averaging_period(recipe):
        assert low_rounds_remark(recipe, rung.least_steps // 2) is not None or "OneBit" in rung.name


@pytest.mark.parametrize(("rule", "adaptive"), [(SGD, False), (Adam, True), (AdamW, True), (RMSprop, True)])
def test_adam_and_its_kin_are_told_from_sgd(rule, adaptive: bool) -> None:
    assert is_adaptive(rule(nn.Linear(2, 2).parameters(), lr=0.1)) == adaptive


def _loss(recipe: str) -> float:
    row = re.search(rf"^\| (?:\.\.\. )?`{re.escape(recipe)}[^|]*\| (\d\.\d+)", PAGE, flags=re.MULTILINE)
    assert row is not None
    return float(row[1])


@pytest.mark.parametrize("recipe", ["Int8()", "PowerSGD(rank=4)", "TopK(density=0.01)"])
def test_steps_follow_from_the_measured_table(recipe: str) -> None:
    """Dense()'s loss falls by 0.364 for every e times as many steps, from 80 to 300 of them."""
    fewer = re.search(r"`Dense\(\)` for the same bytes \(80 steps\) \| (\d\.\d+)", PAGE)
    assert fewer is not None
    falls = (float(fewer[1]) - _loss("Dense()")) / torch.log(torch.tensor(300 / 80)).item()
    assert falls == pytest.approx(0.364, abs=0.001)
    rung = next(rung for rung in RUNGS if resolve(rung.written) == resolve(recipe))
    assert rung.steps_adaptive == pytest.approx(exp((_loss(recipe) - _loss("Dense()")) / falls), abs=0.02)


def test_what_is_explained_names_every_rung() -> None:
    text = "\n".join(ladder_text(Auto(most_steps=1.2, local_steps=False)))
    assert all(rung.name in text for rung in RUNGS)
    assert text.count("never") == 10  # TopK and the four of local steps, each for both
    assert all(len(line) <= 120 for line in text.splitlines() if not line.endswith(RUNGS[-1].name))
    assert "This one has 20,000." in "\n".join(ladder_text(Auto(steps=20_000)))


def test_measurements_travel_as_text() -> None:
    told = Measurement(steps=(StepSeconds(0.1234567, 0.05, 0.01, 0.0),), bytes_sent=12.5, gradient_norm=1 / 3)
    heard = Measurement.from_text(told.to_text())
    assert heard.steps == (StepSeconds(0.1235, 0.05, 0.01, 0.0),)
    assert heard.gradient_norm == 1 / 3
    assert heard.learning_rate is None
    assert Measurement.from_text(Measurement().to_text()) == Measurement()
    assert common_steps([told, Measurement()]) == [told.steps]
    assert common_steps([]) == []
