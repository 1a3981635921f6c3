"""SecureAggregation: the server learns the sum of a cohort's contributions, and of each of them nothing."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.core.term import Term
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class SecureAggregation(Term):
    """Masks that cancel in the sum: the server learns what all sent together, and of each device nothing.

    y_i = x_i + PRG(b_i) + sum over j > i of PRG(s_ij) - sum over j < i of PRG(s_ij)  mod R
    source: Bonawitz et al. 2017, CCS; Bell et al. 2020, CCS (neighbors)
    """

    kind = "secure"

    threshold: float = 0.6  # share of a cohort that has to stay until the end, or the round is given up
    neighbors: int | None = None  # with whom a device shares masks; None: the whole cohort
    bits: int = 16  # of a number that is summed, before the sum

    def __post_init__(self) -> None:
        require(0.5 < self.threshold <= 1, f"threshold is a share above a half and at most 1, not {self.threshold}")
        require(self.neighbors is None or self.neighbors >= 2, f"neighbors is 2 or more, not {self.neighbors}")
        require(2 <= self.bits <= 32, f"bits is 2 to 32, not {self.bits}")
