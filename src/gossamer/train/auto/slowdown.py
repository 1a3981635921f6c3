"""Slowdown: the latest steps of a rank, where they wait so long that all should look at once.

A look is many steps away where steps are short, and each of them takes ten times as long on a line that has lost nine
tenths of its rate. So the report that ends a step, which travels anyway, asks for one.
"""

from __future__ import annotations

from collections.abc import Sequence

from gossamer.train.auto.measurement import StepSeconds

LEAST_STEPS = 2  # that are told of alone: a single one may be a hiccup


def asks_for_look(steps: Sequence[StepSeconds], usual: float | None) -> bool:
    """Whether the latest of these waited longer than a step took in all at the last look. usual: those seconds; None:
    nobody knows. Computing that takes long, as an evaluation does, is no reason to look."""
    return bool(_tail(steps, usual))


def slow_steps(steps: Sequence[StepSeconds], usual: float | None) -> Sequence[StepSeconds]:
    """Those at the end that a look is to be told of alone; empty where it is to be told of all."""
    tail = _tail(steps, usual)
    return tail if len(tail) >= LEAST_STEPS else ()


def _tail(steps: Sequence[StepSeconds], usual: float | None) -> Sequence[StepSeconds]:
    """The longest one of steps that waited longer than a usual one took."""
    if usual is None:
        return ()
    begin = len(steps)
    while begin and steps[begin - 1].waiting > usual:
        begin -= 1
    return steps[begin:]
