"""Stop condition: ends a federation once a metric is good enough."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gossamer.events import notice

COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


@dataclass(frozen=True)
class StopCondition:
    """A metric compared with a number, such as accuracy>0.95."""

    metric: str
    comparison: str
    limit: float

    @classmethod
    def read(cls, text: str) -> StopCondition:
        """Raises ValueError."""
        found = re.fullmatch(r"\s*([^<>=\s]+)\s*(>=|<=|>|<)\s*(\S+)\s*", text)
        try:
            if found is None:
                raise ValueError
            return cls(found[1], found[2], float(found[3]))
        except ValueError:
            raise ValueError(
                f"{text!r} is no metric compared with a number, so it would never end: write accuracy>0.95"
            ) from None

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Not in a round that does not tell the metric: some evaluate every few rounds only."""
        return self.metric in metrics and bool(COMPARISONS[self.comparison](metrics[self.metric], self.limit))

    def check_told(self, rounds: Sequence[Mapping[str, float]]) -> None:
        """Notice, at the end, that no round told the metric. rounds: the metrics of each."""
        names = {name for metrics in rounds for name in metrics}
        if self.metric not in names:
            notice(
                f"Nothing told {self.metric!r}, so the federation could not end by {self}; there are: "
                f"{', '.join(sorted(names)) or 'no metrics'}. Return it from the function that is marked "
                f'evaluate: Update(samples=n, metrics={{"{self.metric}": ...}})'
            )

    def __str__(self) -> str:
        return f"{self.metric}{self.comparison}{self.limit:g}"
