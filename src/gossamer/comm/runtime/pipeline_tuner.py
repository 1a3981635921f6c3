"""Auto-tuning of the pipeline: how many scripts advance at once, chosen by trial."""

from __future__ import annotations

from collections.abc import Generator
from math import isfinite, nan
from statistics import median
from typing import Any

import torch

from gossamer.base.ops import AllGather
from gossamer.comm.runtime.pipeline import DEPTH

TRIAL_DEPTHS = (1, 2, 2, 1, 1, 2, 2, 1)  # their middles lie together: what changes from step to step favors neither
FIRST_TRIAL, TRIAL_PERIOD = 3, 1000  # exchanges before the first, and from the beginning of one to that of the next


class PipelineTuner:
    """Tries the pipeline with one script and with DEPTH scripts at once, and keeps what let exchanges end sooner.

    After a few exchanges, and after every thousand, TRIAL_DEPTHS is gone through; then ranks gather the medians of what
    either depth took (so that a hiccup counts little) and keep the one whose sum over ranks is smaller. The choice
    follows from the number of exchanges and from gathered numbers alone, so it is the same on every rank.
    """

    def __init__(self) -> None:
        self._ended, self._kept = 0, DEPTH
        self._took: dict[int, list[float]] = {window: [] for window in (1, DEPTH)}

    @property
    def window(self) -> int:
        """The depth of the exchange that is next, or goes on."""
        return TRIAL_DEPTHS[self._place] if self._place in range(len(TRIAL_DEPTHS)) else self._kept

    @property
    def over(self) -> bool:
        """Whether the exchange that ended was the last of a trial, so that ranks compare now."""
        return self._place == len(TRIAL_DEPTHS)

    def ended(self, seconds: float | None) -> None:
        """Record how long an exchange took; None where that is not representative, as on a rank without data."""
        if self._place == 0:
            self._took = {window: [] for window in self._took}
        if seconds is not None:
            self._took[self.window].append(seconds)
        self._ended += 1

    def compare(self) -> Generator[AllGather, Any, None]:
        """Keep the depth that all ranks together found faster; ranks that lack one do not count. 16 bytes each."""
        mine = [median(seconds or [nan]) for seconds in self._took.values()]
        heard = yield AllGather((torch.tensor(mine, dtype=torch.float64, device="cpu"),))
        found = [both for both in (numbers.tolist() for (numbers,) in heard) if all(map(isfinite, both))]
        if found:
            one, several = map(sum, zip(*found, strict=True))
            self._kept = DEPTH if several < one else 1

    @property
    def _place(self) -> int:
        """The place in the trial that goes on, or was the last to begin; below 0 before the first."""
        since = self._ended - FIRST_TRIAL
        return since % TRIAL_PERIOD if since >= 0 else since
