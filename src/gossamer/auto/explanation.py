"""Explanations: a change in one line, and the ladder for `gossamer explain auto`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gossamer.auto import loss_guard
from gossamer.auto.ladder import RUNGS, Rung
from gossamer.auto.network_fit import Line, Window
from gossamer.auto.pricing import RungPrice
from gossamer.observe.units import rate_text, seconds_text, share_text


def change_text(window: Window, line: Line, before: RungPrice, after: RungPrice) -> str:
    """Why: what was measured, and what is foretold."""
    saved = 1 - after.loss_seconds / before.loss_seconds
    return (
        f"a step takes {seconds_text(window.step)}, {seconds_text(window.computing)} of it computing, over "
        f"{rate_text(line.bits_per_second)} and {seconds_text(line.trip_seconds)} a message; foretold "
        f"{seconds_text(after.step_seconds)}, and {share_text(abs(saved))} {'less' if saved >= 0 else 'more'} time "
        "to the same loss"
    )


def ladder_text(open_rungs: Sequence[Rung]) -> Iterator[str]:
    """The rungs, the rule and what bounds the loss, line by line."""
    yield "chosen while training, from weak to strong, by how many steps each needs to the loss of Dense():"
    yield f"  {'':<72}{'Adam':>6}{'SGD':>7}"
    for rung in RUNGS:
        closed = "" if rung in open_rungs else "   closed"
        yield f"  {rung.name:<72}{rung.steps_adaptive:>6.2f}{rung.steps_sgd:>7.2f}{closed}"
    yield "changed between two steps, on all ranks alike, where another rung saves more than 15 % of the time to a loss"
    yield "for three looks in a row, and 100 steps after the last change; at once where a step takes 3 times what was"
    yield "foretold. A weaker rung within 10 % of the best is preferred, so a fast network keeps Dense()."
    yield (
        f"bound: no rung above {loss_guard.LOSSLESS_STEPS:.2f} while the learning rate rises or the gradient's norm "
        f"moves by {share_text(loss_guard.MOST_MOVED)};"
    )
    most = f"{loss_guard.MOST_RESIDUAL_GRADIENTS:g}"
    yield f"a rung is left where more than {most} gradients wait to be sent at a look"
