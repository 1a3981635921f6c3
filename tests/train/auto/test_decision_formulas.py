"""The formulas of the rule, computed by hand for two rungs: Dense() takes 1 s a step, a compressed rung 0.46 s."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gossamer.train.auto.decision import RungChange, change_cost, decide
from gossamer.train.auto.measurement import Measurement, StepSeconds
from gossamer.train.auto.network_fit import FittedLine
from gossamer.train.auto.pricing import RungPrice
from gossamer.train.auto.rule import Rule, RuleState
from gossamer.train.auto.rung_cost import RungCost

DENSE = RungCost(name="dense", steps=1.0, period=1, bytes_sent=1e6, trips=0.0, codec_seconds=0.0, buckets=1)
LOSSY = replace(DENSE, name="lossy", steps=1.5, bytes_sent=1e5)
LINE = FittedLine(seconds_per_byte=0.6e-6, trip_seconds=0.0)
STEPS = 20
SAVED = 1 - 1.5 * 0.46  # share of the seconds to a loss: the compressed step computes 0.4 s and sends for 0.06 s
RULE = Rule()


def look(
    state: RuleState, lossy: RungCost = LOSSY, step: int = 100, **told: float
) -> tuple[RuleState, RungChange | None]:
    """One look, after 20 steps in which every rank computed 0.4 s and waited 0.6 s for the bytes of its rung."""
    seconds = StepSeconds(1.0, 0.6, 0.6, 0.0) if state.rung == 0 else StepSeconds(0.46, 0.06, 0.06, 0.0)
    sent = (DENSE, lossy)[state.rung].bytes_sent
    measured = Measurement(steps=[seconds] * STEPS, stands_for=STEPS, bytes_sent=sent, **told)
    return decide(RULE, [DENSE, lossy], state, [measured] * 2, step)


def later(**fields: object) -> RuleState:
    """The state at a look that is not the first one, at which a change is still too expensive."""
    return replace(RuleState(line=LINE, changed_at=99, doublings=RULE.most_doublings), **fields)


def test_staying_loses_the_saved_share_of_all_seconds_since_the_last_look() -> None:
    state, change = look(later())
    assert change is None
    assert state.lost == pytest.approx((0.0, STEPS * 1.0 * SAVED))
    again, _ = look(replace(state, equation=None))
    assert again.lost == pytest.approx((0.0, 2 * STEPS * 1.0 * SAVED))


def test_a_weaker_rung_counts_as_a_tenth_cheaper() -> None:
    state, _ = look(later(rung=1))
    share = 1 - 1.0 / (1.5 * 0.46) + RULE.close  # below 0: Dense() is slower
    assert share < 0
    assert state.lost == pytest.approx((0.0, 0.0))
    equal, _ = look(later(rung=1), replace(LOSSY, steps=1.0 / 0.46))
    assert equal.lost == pytest.approx((STEPS * 0.46 * RULE.close, 0.0))


@pytest.mark.parametrize(("saved", "changes"), [(0.10, False), (0.14, False), (0.16, True), (0.3, True)])
def test_a_stronger_rung_is_taken_if_it_saves_more_than_its_worth(saved: float, changes: bool) -> None:
    _, change = look(RuleState(), replace(LOSSY, steps=(1 - saved) / 0.46))
    assert (change is not None) == changes


@pytest.mark.parametrize("doublings", [0, 1, 3])
def test_an_overgrown_rung_stays_closed_longer_after_each_change(doublings: int) -> None:
    state, change = look(later(rung=1, doublings=doublings), gradient_norm=1.0, residual_norm=11.0)
    assert change is not None
    assert change.after == 0
    assert (state.closed_from, state.closed_until) == (1, 100 + 1000 * 2**doublings)


PRICES = [
    RungPrice(name="dense", step_seconds=1.0, loss_seconds=1.0),
    RungPrice(name="lossy", step_seconds=0.46, loss_seconds=0.69),
]


@pytest.mark.parametrize("doublings", [0, 2, 6])
def test_a_change_costs_five_steps_of_the_target_doubled_by_each_change_before(doublings: int) -> None:
    state = RuleState(changed_at=50, doublings=doublings)
    assert change_cost(RULE, state, DENSE, PRICES, 1, 60) == pytest.approx(5 * 0.46 * 2**doublings)


def test_leaving_local_steps_costs_a_dense_mean_in_addition() -> None:
    local = replace(LOSSY, period=20)
    assert change_cost(RULE, RuleState(), local, PRICES, 0, 60) == pytest.approx(5 * 1.0 + 1.0)


@pytest.mark.parametrize(("steps", "cost"), [(128 * 5 * 4, 4.0), (128 * 5 * 4 + 1, 1.0)])
def test_a_long_rest_makes_the_cost_single_again(steps: int, cost: float) -> None:
    state = RuleState(changed_at=50, doublings=2)
    assert change_cost(RULE, state, DENSE, PRICES, 1, 50 + steps) == pytest.approx(5 * 0.46 * cost)
