"""Decision: the rule by which all ranks change their recipe at the same step, from the same numbers.

At every look: fit the network line, price the rungs, and find the best one. Among rungs within a tenth of the best
rung's seconds to a loss, the target is the one with the fewest steps, so Dense() if it is among them. It is adopted
once staying has lost as much as a change costs (ski rental), in seconds:

    lost(rung) = max(0, lost(rung) + seconds since the last look * (1 - price(rung) / price(here)))
    cost       = 5 steps of the target, and a dense mean if workers trained separately
    change     if lost(target) >= cost, and the target is weaker, or stronger and saves more than 15 %

One step that takes ten times as long therefore counts more than ten steps that take a tenth longer. A weaker rung is
priced a tenth lower than estimated. The first look decides at once, since the initial rung was not chosen from
measurements. The cost doubles with every change, up to 64 times, and is reset after a long time without changes. On an
unstable network the rule thus averages over longer times, and all changes together cost at most what staying would have
lost.

It uses only sums, products and comparisons of numbers that every rank has, in one order, so results are equal on
different processors.

source: Karlin et al. 1988, Algorithmica (ski rental); Borodin et al. 1992, JACM (metrical task systems)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from gossamer.algorithms.recipes.auto import Auto
from gossamer.base.units import rate_text, seconds_text, share_text
from gossamer.train.auto import loss_guard
from gossamer.train.auto.ladder import RUNGS, UNKNOWN_STEPS, LadderRung, admitted
from gossamer.train.auto.measurement import MOST_STEPS, Measurement
from gossamer.train.auto.network_fit import Equation, FittedLine, StepWindow, fit, observe
from gossamer.train.auto.pricing import RungPrice, price
from gossamer.train.auto.rule import Rule, RuleState
from gossamer.train.auto.rung_cost import RungCost


@dataclass(frozen=True, kw_only=True)
class RungChange:
    """A change from one rung to another."""

    before: int
    after: int
    reason: str  # with the numbers that justify it


def decide(
    rule: Rule, costs: Sequence[RungCost], state: RuleState, measurements: Sequence[Measurement], step: int
) -> tuple[RuleState, RungChange | None]:
    """Decide at one look, after `step` steps. measurements: of all ranks, in rank order."""
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
    if not (due and _favors(rule, state.rung, target, prices)):
        return state, None
    why = change_text(window, line, prices[state.rung], prices[target])
    change = RungChange(before=state.rung, after=target, reason=why + "; residuals are too large" * overgrown)
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
    """Steps until the next look: those of `look_seconds`, at most MOST_STEPS, more if looks would exceed their share of
    the time; in whole periods of local steps."""
    wanted = rule.look_seconds / step_seconds if step_seconds else float(MOST_STEPS)
    affordable = _affordable(rule.look_share, step_seconds, measurements)
    return _whole_periods(max(rule.least_look_steps, ceil(min(MOST_STEPS, wanted)), affordable), here)


def _affordable(share: float, step_seconds: float, measurements: Sequence[Measurement]) -> int:
    """Number of steps of which a look takes this share."""
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
    """As many steps as since the last change: after a change, looks are frequent and may take a larger share."""
    affordable = _affordable(rule.soon_share, step_seconds, measurements)
    return _whole_periods(max(step - (state.changed_at or 0), affordable), here)


def _whole_periods(steps: int, here: RungCost) -> int:
    return -(-steps // here.period) * here.period


# -- the choice --------------------------------------------------------------------------------------------------------


def _overgrown(state: RuleState, here: RungCost, measurements: Sequence[Measurement]) -> bool:
    """Whether residuals are too large. With local steps, residuals of parameters cannot be compared with gradients."""
    ratio = None if here.local else loss_guard.residual_gradients(measurements)
    return state.rung > 0 and ratio is not None and ratio > loss_guard.MOST_RESIDUAL_GRADIENTS


def _open(state: RuleState, costs: Sequence[RungCost], step: int) -> range:
    """The rungs that may be used now, from weak to strong."""
    return range(len(costs) if state.closed_from is None or step >= state.closed_until else state.closed_from)


def _target(rule: Rule, here: int, among: Sequence[int], costs: Sequence[RungCost], prices: Sequence[RungPrice]) -> int:
    """Among the rungs close to the best of `among`, the one with the fewest steps. Ties: Dense(), then the current
    rung, then the weakest."""
    best = min(prices[place].loss_seconds for place in among)
    near = [place for place in among if (1 - rule.close) * prices[place].loss_seconds <= best]
    return min(near, key=lambda place: (costs[place].steps, place != 0, place != here, place))


def _favors(rule: Rule, here: int, target: int, prices: Sequence[RungPrice]) -> bool:
    return target < here or (target > here and _saved(prices, here, target) > rule.worth)


def _saved(prices: Sequence[RungPrice], here: int, other: int) -> float:
    return 1 - prices[other].loss_seconds / prices[here].loss_seconds


def _lost(rule: Rule, state: RuleState, prices: Sequence[RungPrice], window: StepWindow) -> tuple[float, ...]:
    """Seconds that staying has lost to each rung since the last change."""
    before = state.lost or (0.0,) * len(prices)
    shares = [_saved(prices, state.rung, other) + rule.close * (other < state.rung) for other in range(len(prices))]
    seconds = window.steps * prices[state.rung].step_seconds
    return tuple(max(0.0, lost + seconds * min(1.0, share)) for lost, share in zip(before, shares, strict=True))


def change_cost(
    rule: Rule, state: RuleState, here: RungCost, prices: Sequence[RungPrice], target: int, step: int
) -> float:
    """Cost of a change, in seconds."""
    means = rule.change_means * prices[0].step_seconds * here.local
    return (rule.change_steps * prices[target].step_seconds + means) * 2.0 ** _doublings(rule, state, step)


def _doublings(rule: Rule, state: RuleState, step: int) -> int:
    rested = step - (state.changed_at or 0) > rule.rest * rule.change_steps * 2.0**state.doublings
    return 0 if rested else state.doublings


def _changed(rule: Rule, state: RuleState, after: RungCost, change: RungChange, step: int) -> RuleState:
    """The state after a change. Each change doubles the cost of the next one, except the first."""
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


# -- a change in one line, and the ladder for `gossamer explain auto` --------------------------------------------------


def change_text(window: StepWindow, line: FittedLine, before: RungPrice, after: RungPrice) -> str:
    """The reason of a change: measurements and estimates."""
    saved = 1 - after.loss_seconds / before.loss_seconds
    return (
        f"a step takes {seconds_text(window.step)}, {seconds_text(window.computing)} of it computing, over "
        f"{rate_text(line.bits_per_second)} and {seconds_text(line.trip_seconds)} a message; estimated "
        f"{seconds_text(after.step_seconds)}, and {share_text(abs(saved))} {'less' if saved >= 0 else 'more'} time "
        "to the same loss"
    )


def ladder_text(auto: Auto) -> Iterator[str]:
    """The rungs, the rule and the limits that protect the loss, line by line."""
    rule, kinds = Rule(), {"Adam": True, "SGD": False}
    yield f"{auto!r}: one of these recipes at a time, from weak to strong"
    yield "".join(f"{kind:>7}" for kind in kinds) + f"{'from':>8}"
    for rung in RUNGS:
        shown = (_steps(rung, auto, adaptive=adaptive) for adaptive in kinds.values())
        least = f"{rung.least_steps:,}" if rung.least_steps else ""
        yield "".join(f"{steps:>7}" for steps in shown) + f"{least:>8}  {rung.name}"
    yield "Adam, SGD: steps to a loss, relative to Dense(), with optimizers of this kind."
    yield f"from: only in trainings with at least so many steps. {_training(auto)}"
    worth, close, moved = share_text(rule.worth), share_text(rule.close), share_text(loss_guard.MOST_MOVED)
    yield f"All ranks change between the same two steps: to a stronger recipe if the best saves {worth} of the"
    dearest = rule.change_steps * 2**rule.most_doublings
    lost = f"{rule.change_steps:g} steps of the new"
    yield f"time to a loss, or to a weaker one within {close} of the best; once staying has lost {lost},"
    yield "and a dense mean after local steps. Each change doubles the cost of the next one, up to"
    yield f"{dearest:g} steps, until none was made for a long time."
    yield f"While the learning rate rises or the gradient's norm changes by {moved} in {loss_guard.WINDOW_STEPS} steps,"
    yield f"the additional steps of compressed gradients count {loss_guard.CAUTION:g} times. A recipe is left if its"
    yield f"residuals exceed {loss_guard.MOST_RESIDUAL_GRADIENTS:g} gradients."


def _training(auto: Auto) -> str:
    if auto.steps is None:
        return f"{UNKNOWN_STEPS:,} are assumed; for more, write Auto(steps=20000)."
    return f"This one has {auto.steps:,}."


def _steps(rung: LadderRung, auto: Auto, *, adaptive: bool) -> str:
    return f"{rung.steps(adaptive=adaptive):.2f}" if rung in admitted(auto, adaptive=adaptive) else "never"
