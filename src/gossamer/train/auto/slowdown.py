"""Slowdown: detects the latest steps of a rank that wait so long that all ranks should measure at once.

If steps are short, the next look is many steps away, and each takes ten times as long on a network that has lost nine
tenths of its rate. The report at the end of a step therefore requests a look.
"""

from __future__ import annotations

from collections.abc import Sequence

from gossamer.train.auto.measurement import StepSeconds

LEAST_STEPS = 2  # minimum for a separate measurement, since a single slow step may be an outlier


def asks_for_look(steps: Sequence[StepSeconds], usual: float | None) -> bool:
    """Whether the latest step waited longer than a whole step took at the last look. usual: those seconds, or None.
    Long computing, for example an evaluation, is no reason to look."""
    return bool(_tail(steps, usual))


def slow_steps(steps: Sequence[StepSeconds], usual: float | None) -> Sequence[StepSeconds]:
    """The latest slow steps, if a look should use only them; otherwise empty."""
    tail = _tail(steps, usual)
    return tail if len(tail) >= LEAST_STEPS else ()


def _tail(steps: Sequence[StepSeconds], usual: float | None) -> Sequence[StepSeconds]:
    """The longest sequence of steps at the end that waited longer than a usual step took."""
    if usual is None:
        return ()
    begin = len(steps)
    while begin and steps[begin - 1].waiting > usual:
        begin -= 1
    return steps[begin:]
