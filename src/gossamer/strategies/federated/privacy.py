"""Privacy: how much of any one device can be learned from a federation's versions, and how that is bounded."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass

from gossamer.core.term import Term


@dataclass(frozen=True, repr=False)
class Privacy(Term, ABC):
    """User-level differential privacy: contributions are clipped, and noise is added."""

    kind = "privacy"
