"""Auto-tuning of the pipeline: how many scripts advance at once, chosen by trial."""

from __future__ import annotations

from collections.abc import Generator
from math import isfinite, nan
from statistics import median
from typing import Any

import torch

from gossamer.core.ops import AllGather
from gossamer.runtime.pipeline import DEPTH

TRIAL_DEPTHS = (1, 2, 2, 1, 1, 2, 2, 1)  # their middles lie together: what changes from step to step favours neither


FIRST_TRIAL, TRIAL_PERIOD = 3, 1000  # exchanges before the first, and from the beginning of one to that of the next


class PipelineTuner:
    """How many scripts go on at once, one or WINDOW, where that has to be tried: whichever let exchanges end sooner.

    After a few exchanges, and after every thousand, TRIED is gone through; then all ranks tell each other what either
    window took them (medians, so that a hiccup counts little) and keep the one whose sum over ranks is smaller. It
    follows from nothing but how many exchanges there were and what everyone has heard, so it is the same on every rank.
    """

    def __init__(self) -> None:
        self._ended, self._kept = 0, DEPTH
        self._took: dict[int, list[float]] = {window: [] for window in (1, DEPTH)}

    @property
    def window(self) -> int:
        """Of the exchange that is next, or goes on."""
        return TRIAL_DEPTHS[self._place] if self._place in range(len(TRIAL_DEPTHS)) else self._kept

    @property
    def over(self) -> bool:
        """Whether the exchange that ended was the last of a trial, so that ranks compare now."""
        return self._place == len(TRIAL_DEPTHS)

    def ended(self, seconds: float | None) -> None:
        """An exchange took so long from its beginning on; None where that says nothing, as on a rank without data."""
        if self._place == 0:
            self._took = {window: [] for window in self._took}
        if seconds is not None:
            self._took[self.window].append(seconds)
        self._ended += 1

    def compare(self) -> Generator[AllGather, Any, None]:
        """Keep what all ranks together found to be faster; who has not seen both has no say. 16 bytes to everyone."""
        mine = [median(seconds or [nan]) for seconds in self._took.values()]
        heard = yield AllGather((torch.tensor(mine, dtype=torch.float64, device="cpu"),))
        found = [both for both in (numbers.tolist() for (numbers,) in heard) if all(map(isfinite, both))]
        if found:
            one, several = map(sum, zip(*found, strict=True))
            self._kept = DEPTH if several < one else 1

    @property
    def _place(self) -> int:
        """In the trial that goes on, or was the last to begin; below 0 before the first."""
        since = self._ended - FIRST_TRIAL
        return since % TRIAL_PERIOD if since >= 0 else since
