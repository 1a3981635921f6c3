"""Decision: the rule by which all ranks change their recipe alike, from the same numbers and nothing else.

At every look: fit the line, price the rungs, and see which is best. Of those within a tenth of the best one's seconds
to a loss the target is the one that needs the fewest steps, so Dense() if it is among them. It is taken when

    it is stronger, and the best saves more than 15 %, or it is weaker;
    three looks in a row have said so, the same way;
    the last change was at least `dwell` steps ago.

Before the first change one look decides.

At once, without the last two, where a step takes more than three times what was foretold, for this rung or for the
best: once in a dwell. A change that takes back the one before it doubles the dwell, up to 16 times; a long rest makes
it short again.

Only sums, products and comparisons of numbers that every rank has, in one order: equal on unlike processors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from gossamer.auto import loss_guard
from gossamer.auto.explanation import change_text
from gossamer.auto.measurement import MOST_STEPS, Measurement
from gossamer.auto.network_fit import Equation, StepWindow, fit, observe
from gossamer.auto.pricing import RungPrice, price
from gossamer.auto.rule import Rule, RuleState
from gossamer.auto.rung_cost import RungCost

LONG_REST_DWELLS = 4  # without a change, after which the dwell is short again
CLOSED_DWELLS = 10  # for which a rung is closed where too much waited to be sent


@dataclass(frozen=True, kw_only=True)
class RungChange:
    """From one rung to another."""

    before: int
    after: int
    reason: str  # with the numbers that speak for it


def decide(
    rule: Rule, costs: Sequence[RungCost], state: RuleState, measurements: Sequence[Measurement], step: int
) -> tuple[RuleState, RungChange | None]:
    """One look, after `step` steps. measurements: all ranks', in order of rank."""
    here = costs[state.rung]
    window = observe(measurements, here.period, rule.believed)
    if window is None:
        return replace(state, next_look=step + _whole_periods(rule.least_look_steps, here)), None
    surprised = state.foretold is not None and window.step > rule.surprise * state.foretold
    warms_up = loss_guard.warms_up(measurements, state.learning_rate)
    now = Equation(
        rung=here.name,
        bytes_sent=window.bytes_sent or here.bytes_sent,
        trips=here.trips,
        wire=window.wire,
        waited_for=window.waiting > window.wire / 2,
    )
    line = fit(now, measurements, state.equation, state.line)
    state = replace(_remember(rule, state, here, window, measurements, step), equation=now, line=line)
    critical = warms_up or loss_guard.moves(state.norms)
    prices = price(costs, here, window, line, state.codec_seconds, loss_guard.CAUTION if critical else 1.0)
    overgrown = _overgrown(state, here, measurements)
    if overgrown:
        state = replace(state, closed_from=state.rung, closed_until=step + CLOSED_DWELLS * _dwell(rule, state))
    among = _open(state, costs, step)
    target, saved = _target(rule, state.rung, among, costs, prices)
    state = _vote(rule, state, target, saved)
    surprised = surprised or 1 / rule.surprise > 1 - saved
    hurries = overgrown or (surprised and _may_hurry(rule, state, step))
    if not state.votes or not (hurries or _is_due(rule, state, step)):
        return state, None
    why = change_text(window, line, prices[state.rung], prices[target])
    change = RungChange(before=state.rung, after=target, reason=why + "; too much waits to be sent" * overgrown)
    if surprised:
        state = replace(state, surprised_at=step)
    return _changed(rule, state, costs[target], prices[target], change, step), change


def _remember(
    rule: Rule,
    state: RuleState,
    here: RungCost,
    window: StepWindow,
    measurements: Sequence[Measurement],
    step: int,
) -> RuleState:
    return replace(
        state,
        next_look=step + min(look_steps(rule, here, window.step, measurements), _soon(state, here, step)),
        foretold=window.step,
        codec_seconds={**state.codec_seconds, here.name: window.codec},
        norms=loss_guard.remember(state.norms, step, loss_guard.gradient_norm(measurements)),
        learning_rate=loss_guard.learning_rate(measurements),
    )


def look_steps(rule: Rule, here: RungCost, step_seconds: float, measurements: Sequence[Measurement]) -> int:
    """Steps until the next look: so many seconds, but as many steps as are told of at most, unless looks would take
    too much of the time; whole periods of local steps."""
    took = max((each.look_seconds for each in measurements if each.look_seconds is not None), default=0.0)
    wanted, affordable = float(MOST_STEPS), 0.0
    if step_seconds:
        wanted, affordable = rule.look_seconds / step_seconds, took / (rule.look_share * step_seconds)
    return _whole_periods(max(rule.least_look_steps, ceil(min(MOST_STEPS, wanted)), ceil(affordable)), here)


def _soon(state: RuleState, here: RungCost, step: int) -> int:
    """As many steps again as since the last change: where everything is new, the first looks come soon."""
    return _whole_periods(step - (state.changed_at or 0), here)


def _whole_periods(steps: int, here: RungCost) -> int:
    return -(-steps // here.period) * here.period


# -- the choice --------------------------------------------------------------------------------------------------------


def _overgrown(state: RuleState, here: RungCost, measurements: Sequence[Measurement]) -> bool:
    """Differences of parameters are no gradients, so there the two cannot be compared."""
    ratio = None if here.local else loss_guard.residual_gradients(measurements)
    return state.rung > 0 and ratio is not None and ratio > loss_guard.MOST_RESIDUAL_GRADIENTS


def _open(state: RuleState, costs: Sequence[RungCost], step: int) -> range:
    """The rungs that may be in force now, from weak to strong."""
    return range(len(costs) if state.closed_from is None or step >= state.closed_until else state.closed_from)


def _target(
    rule: Rule, here: int, among: Sequence[int], costs: Sequence[RungCost], prices: Sequence[RungPrice]
) -> tuple[int, float]:
    """Of the rungs that are nearly as good as the best of these the one that needs the fewest steps, and what the best
    would save. Of equals Dense() is taken, or what is in force, or the weakest."""
    best = min(prices[place].loss_seconds for place in among)
    near = [place for place in among if (1 - rule.close) * prices[place].loss_seconds <= best]
    target = min(near, key=lambda place: (costs[place].steps, place != 0, place != here, place))
    return target, 1 - best / prices[here].loss_seconds


def _vote(rule: Rule, state: RuleState, target: int, saved: float) -> RuleState:
    """Count the looks in a row that say the same."""
    direction = (target > state.rung) - (target < state.rung)
    if direction > 0 and saved <= rule.worth:
        direction = 0
    return replace(state, votes=state.votes + direction if state.votes * direction > 0 else direction)


def _dwell(rule: Rule, state: RuleState) -> int:
    return rule.dwell_steps << state.doublings


def _is_due(rule: Rule, state: RuleState, step: int) -> bool:
    rested = state.changed_at is None or step - state.changed_at >= _dwell(rule, state)
    looks = rule.first_looks if state.changed_at is None else rule.looks
    return abs(state.votes) >= looks and rested


def _may_hurry(rule: Rule, state: RuleState, step: int) -> bool:
    return state.surprised_at is None or step - state.surprised_at >= _dwell(rule, state)


def _changed(
    rule: Rule, state: RuleState, after: RungCost, foretold: RungPrice, change: RungChange, step: int
) -> RuleState:
    """A change that takes back the one before makes the next wait longer."""
    went = 1 if change.after > change.before else -1
    doublings = state.doublings
    if state.changed_at is not None and step - state.changed_at > LONG_REST_DWELLS * _dwell(rule, state):
        doublings = 0
    elif went * state.went < 0:
        doublings = min(doublings + 1, rule.most_doublings)
    return replace(
        state,
        rung=change.after,
        changed_at=step,
        went=went,
        doublings=doublings,
        votes=0,
        foretold=foretold.step_seconds,
        next_look=step + _whole_periods(rule.settling_steps, after),
    )
