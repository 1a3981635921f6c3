"""Interleaved timing: all timers run once in every round, so that disturbances of the machine affect all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Key = TypeVar("Key")
Timer = Callable[[], Sequence[float]]  # seconds of each part


def interleave(
    timers: Mapping[Key, Timer], rounds: int, tick: Callable[[Key], None] = lambda key: None
) -> dict[Key, list[Sequence[float]]]:
    """Run each timer once per round; the first round is a warm-up. `tick` is called with each key before its timer."""
    found: dict[Key, list[Sequence[float]]] = {key: [] for key in timers}
    for turn in range(rounds + 1):
        for key, timer in timers.items():
            tick(key)
            seconds = timer()
            if turn:
                found[key].append(seconds)
    return found


def seconds_of(work: Callable[[], object]) -> Timer:
    """A timer of one part."""

    def timer() -> tuple[float]:
        began = time.perf_counter()
        work()
        return (time.perf_counter() - began,)

    return timer


def spread(values: Sequence[float]) -> float:
    """Interquartile range divided by the median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle
