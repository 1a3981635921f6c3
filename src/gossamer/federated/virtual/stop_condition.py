"""Stop condition: ends a federation once a metric is good enough."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.errors import LoopError

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
        """Raises LoopError where there is no such metric."""
        if self.metric not in metrics:
            raise LoopError(
                f"nothing tells {self.metric!r}, so the federation would never end by it; there are: "
                f"{', '.join(sorted(metrics)) or 'no metrics'}. Return it from the function that is marked "
                f'evaluate: Update(samples=n, metrics={{"{self.metric}": ...}})'
            )
        return bool(COMPARISONS[self.comparison](metrics[self.metric], self.limit))

    def __str__(self) -> str:
        return f"{self.metric}{self.comparison}{self.limit:g}"
