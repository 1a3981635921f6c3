"""Stopping rule of a run: a metric reached its target, or a time is over."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatchmethod
from math import isfinite

from gossamer.base.units import exact_text
from gossamer.events import Attached, Event, Logged, StepEnded


@dataclass(frozen=True)
class Target:
    """A metric and the bound that ends a run, such as validation_loss<2.2."""

    metric: str
    below: bool
    value: float

    def reached(self, value: float | None) -> bool:
        if value is None:
            return False
        return value < self.value if self.below else value > self.value

    def __str__(self) -> str:
        return f"{self.metric}{'<' if self.below else '>'}{exact_text(self.value)}"


def read_target(text: str) -> Target:
    """Read METRIC<NUMBER or METRIC>NUMBER. Raises ValueError."""
    found = re.fullmatch(r"\s*([\w./:@%-]+)\s*([<>])\s*(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*", text)
    if not found or not isfinite(float(found[3])):
        raise ValueError(f"{text!r} is not a target. Write a metric, < or >, and a number, such as validation_loss<2.2")
    return Target(found[1], found[2] == "<", float(found[3]))


class TargetWatch:
    """Listener that calls `enough` once, when the target is reached or `seconds` have passed since attach."""

    def __init__(self, target: Target | None, seconds: float | None, enough: Callable[[], None]) -> None:
        self._target, self._seconds, self._enough = target, seconds, enough
        self._began: float | None = None
        self._reported = False

    def __call__(self, event: Event) -> None:
        if not self._reported and self._is_enough(event):
            self._reported = True
            self._enough()

    @singledispatchmethod
    def _is_enough(self, event: Event) -> bool:
        return False

    @_is_enough.register
    def _(self, event: Attached) -> bool:
        self._began = event.moment
        return False

    @_is_enough.register
    def _(self, event: StepEnded) -> bool:
        return self._seconds is not None and self._began is not None and event.moment - self._began >= self._seconds

    @_is_enough.register
    def _(self, event: Logged) -> bool:
        return self._target is not None and self._target.reached(event.values.get(self._target.metric))
