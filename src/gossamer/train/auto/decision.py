"""Decision: the rule by which all ranks change their recipe alike, from the same numbers and nothing else.

At every look: fit the line, price the rungs, and see which is best. Of those within a tenth of the best one's seconds
to a loss the target is the one that needs the fewest steps, so Dense() if it is among them. It is taken once staying
has lost as much as a change costs (ski rental), in seconds:

    lost(rung) = max(0, lost(rung) + seconds since the last look * (1 - price(rung) / price(here)))
    cost       = 5 steps of the target, and a dense mean where workers trained apart
    change     when lost(target) >= cost, and the target is weaker, or stronger and saves more than 15 %

So one step that takes ten times as long speaks louder than ten that take a tenth more. A weaker rung counts as a tenth
cheaper than it is. The first look decides at once: for what is in force then nothing was said. The cost doubles with
every change up to 64 times; a long rest makes it single again. So a line that flaps is judged by ever longer means, and
what all changes cost is at most what staying would have lost.

Only sums, products and comparisons of numbers that every rank has, in one order: equal on unlike processors.

source: Karlin et al. 1988, Algorithmica (ski rental); Borodin et al. 1992, JACM (metrical task systems)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from gossamer.train.auto import loss_guard
from gossamer.train.auto.explanation import change_text
from gossamer.train.auto.measurement import MOST_STEPS, Measurement
from gossamer.train.auto.network_fit import Equation, StepWindow, fit, observe
from gossamer.train.auto.pricing import RungPrice, price
from gossamer.train.auto.rule import Rule, RuleState
from gossamer.train.auto.rung_cost import RungCost


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
    here, first = costs[state.rung], state.line is None
    window = observe(measurements, here.period, rule.believed)
    if window is None:
        return replace(state, next_look=step + _whole_periods(rule.least_look_steps, here)), None
    now = Equation(
        rung=here.name,
        bytes_sent=window.bytes_sent or here.bytes_sent,
        trips=here.trips,
        wire=window.wire,
        waited_for=window.waiting > window.wire / 2,
    )
    line, factors = fit(now, measurements, state.equation, state.line, state.factors)
    warms_up = loss_guard.warms_up(measurements, state.learning_rate)
    state = replace(_remember(rule, state, here, window, measurements, step), equation=now, line=line, factors=factors)
    critical = warms_up or loss_guard.moves(state.norms)
    caution = loss_guard.CAUTION if critical else 1.0
    prices = price(costs, here, window, line, state.codec_seconds, caution, factors)
    state = replace(state, lost=_lost(rule, state, prices, window), looked_at=step)
    overgrown = _overgrown(state, here, measurements)
    if overgrown:
        closed = rule.closed_steps << state.doublings
        state = replace(state, closed_from=state.rung, closed_until=step + closed)
    target = _target(rule, state.rung, _open(state, costs, step), costs, prices)
    due = first or overgrown or state.lost[target] >= change_cost(rule, state, here, prices, target, step)
    if not (due and _speaks_for(rule, state.rung, target, prices)):
        return state, None
    why = change_text(window, line, prices[state.rung], prices[target])
    change = RungChange(before=state.rung, after=target, reason=why + "; too much waits to be sent" * overgrown)
    return _changed(rule, state, costs[target], change, step), change


def _remember(
    rule: Rule,
    state: RuleState,
    here: RungCost,
    window: StepWindow,
    measurements: Sequence[Measurement],
    step: int,
) -> RuleState:
    usual = look_steps(rule, here, window.step, measurements)
    return replace(
        state,
        next_look=step + min(usual, _soon(rule, state, here, window.step, measurements, step)),
        rest_seconds=_look_seconds(measurements) / rule.soon_share,
        usual_step=None if here.local else window.step,
        codec_seconds={**state.codec_seconds, here.name: window.codec},
        norms=loss_guard.remember(state.norms, step, loss_guard.gradient_norm(measurements)),
        learning_rate=loss_guard.learning_rate(measurements),
    )


def look_steps(rule: Rule, here: RungCost, step_seconds: float, measurements: Sequence[Measurement]) -> int:
    """Steps until the next look: so many seconds, but as many steps as are told of at most, unless looks would take
    too much of the time; whole periods of local steps."""
    wanted = rule.look_seconds / step_seconds if step_seconds else float(MOST_STEPS)
    affordable = _affordable(rule.look_share, step_seconds, measurements)
    return _whole_periods(max(rule.least_look_steps, ceil(min(MOST_STEPS, wanted)), affordable), here)


def _affordable(share: float, step_seconds: float, measurements: Sequence[Measurement]) -> int:
    """Steps of which a look takes this share."""
    return ceil(_look_seconds(measurements) / (share * step_seconds)) if step_seconds else 0


def _look_seconds(measurements: Sequence[Measurement]) -> float:
    return max((each.look_seconds for each in measurements if each.look_seconds is not None), default=0.0)


def _soon(
    rule: Rule,
    state: RuleState,
    here: RungCost,
    step_seconds: float,
    measurements: Sequence[Measurement],
    step: int,
) -> int:
    """As many steps again as since the last change: where everything is new, the first looks come soon, and may take a
    larger share."""
    affordable = _affordable(rule.soon_share, step_seconds, measurements)
    return _whole_periods(max(step - (state.changed_at or 0), affordable), here)


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


def _target(rule: Rule, here: int, among: Sequence[int], costs: Sequence[RungCost], prices: Sequence[RungPrice]) -> int:
    """Of the rungs that are nearly as good as the best of these the one that needs the fewest steps. Of equals Dense()
    is taken, or what is in force, or the weakest."""
    best = min(prices[place].loss_seconds for place in among)
    near = [place for place in among if (1 - rule.close) * prices[place].loss_seconds <= best]
    return min(near, key=lambda place: (costs[place].steps, place != 0, place != here, place))


def _speaks_for(rule: Rule, here: int, target: int, prices: Sequence[RungPrice]) -> bool:
    return target < here or (target > here and _saved(prices, here, target) > rule.worth)


def _saved(prices: Sequence[RungPrice], here: int, other: int) -> float:
    return 1 - prices[other].loss_seconds / prices[here].loss_seconds


def _lost(rule: Rule, state: RuleState, prices: Sequence[RungPrice], window: StepWindow) -> tuple[float, ...]:
    """Seconds that staying has lost to each rung; those before the last change are none of its."""
    before = state.lost or (0.0,) * len(prices)
    shares = [_saved(prices, state.rung, other) + rule.close * (other < state.rung) for other in range(len(prices))]
    seconds = window.steps * prices[state.rung].step_seconds
    return tuple(max(0.0, lost + seconds * min(1.0, share)) for lost, share in zip(before, shares, strict=True))


def change_cost(
    rule: Rule, state: RuleState, here: RungCost, prices: Sequence[RungPrice], target: int, step: int
) -> float:
    """In seconds."""
    means = rule.change_means * prices[0].step_seconds * here.local
    return (rule.change_steps * prices[target].step_seconds + means) * 2.0 ** _doublings(rule, state, step)


def _doublings(rule: Rule, state: RuleState, step: int) -> int:
    rested = step - (state.changed_at or 0) > rule.rest * rule.change_steps * 2.0**state.doublings
    return 0 if rested else state.doublings


def _changed(rule: Rule, state: RuleState, after: RungCost, change: RungChange, step: int) -> RuleState:
    """Each change makes the next one dearer, but for the first one that is made at all."""
    doublings = 0 if state.changed_at is None else min(_doublings(rule, state, step) + 1, rule.most_doublings)
    return replace(
        state,
        rung=change.after,
        changed_at=step,
        doublings=doublings,
        lost=(),
        usual_step=None,
        next_look=step + _whole_periods(rule.settling_steps, after),
    )
