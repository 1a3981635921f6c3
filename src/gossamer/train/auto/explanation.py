"""Explanations: a change in one line, and the ladder for `gossamer explain auto`."""

from __future__ import annotations

from collections.abc import Iterator

from gossamer.algorithms.recipes.auto import Auto
from gossamer.base.units import rate_text, seconds_text, share_text
from gossamer.train.auto import loss_guard
from gossamer.train.auto.ladder import RUNGS, LadderRung, admitted
from gossamer.train.auto.network_fit import FittedLine, StepWindow
from gossamer.train.auto.pricing import RungPrice
from gossamer.train.auto.rule import Rule


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
    rule, wide = Rule(), max(len(rung.name) for rung in RUNGS)
    kinds = {"Adam": True, "SGD": False}
    yield f"{auto!r}: one of these recipes at a time, from weak to strong"
    yield f"  {'steps to a loss, relative to Dense():':>{wide}}" + "".join(f"{kind:>7}" for kind in kinds)
    for rung in RUNGS:
        shown = (_steps(rung, auto, adaptive=adaptive) for adaptive in kinds.values())
        yield f"  {rung.name:<{wide}}" + "".join(f"{steps:>7}" for steps in shown)
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


def _steps(rung: LadderRung, auto: Auto, *, adaptive: bool) -> str:
    return f"{rung.steps(adaptive=adaptive):.2f}" if rung in admitted(auto, adaptive=adaptive) else "never"
