"""Step range: the steps that are recorded or shown, as a user writes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

ENDLESS = 2**62
ALL = "all"
_WRITTEN = re.compile(r"([0-9]*)(:?)([0-9]*)")


@dataclass(frozen=True)
class StepRange:
    """Steps `first` to `last`, both included; the first step of a run is 1."""

    first: int = 0
    last: int = ENDLESS

    def __contains__(self, step: int) -> bool:
        return self.first <= step <= self.last

    def __str__(self) -> str:
        if (self.first, self.last) == (0, ENDLESS):
            return ALL
        return f"{self.first or ''}:{'' if self.last == ENDLESS else self.last}"


def read_steps(text: str) -> StepRange:
    """FIRST:LAST, FIRST:, :LAST, one number, or "all". Raises ValueError with the line to write.

    >>> read_steps("100:110"), read_steps("7")
    (StepRange(first=100, last=110), StepRange(first=7, last=7))
    """
    if text == ALL:
        return StepRange()
    found = _WRITTEN.fullmatch(text)
    if found is None or not any(found.groups()):
        raise ValueError(f'"{text}" names no steps: write FIRST:LAST, such as 100:110, or "{ALL}"')
    first, colon, last = found.groups()
    steps = StepRange(int(first or 0), int(last) if last else ENDLESS if colon else int(first))
    if steps.first > steps.last:
        raise ValueError(f'"{text}" holds no step: the first comes before the last, as in {steps.last}:{steps.first}')
    return steps
