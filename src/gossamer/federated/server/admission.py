"""Admission: refuses reports and contributions that no honest device sends, before anything of them is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gossamer.errors import MalformedError
from gossamer.federated.messages import Report


@dataclass(frozen=True, kw_only=True)
class ContributionLimits:
    """Limits on what one device may claim."""

    most_samples: int = 10**9
    most_parts: int = 1 << 16
    largest_norm: float | None = None  # of a pseudo-gradient; None: any finite one

    def check_report(self, client: int, report: Report, layout: str) -> None:
        """Raises MalformedError, naming the client."""
        if report.layout != layout:
            raise MalformedError(
                f"client {client} trained another model ({report.layout}, and this federation's is {layout}): run the "
                "same script everywhere"
            )
        if not 1 <= report.samples <= self.most_samples:
            raise MalformedError(
                f"client {client} says that it trained on {report.samples} samples; between 1 and {self.most_samples} "
                "count"
            )

    def check_blocks(self, client: int, blocks: Sequence[Tensor]) -> None:
        """Raises MalformedError, naming the client. blocks: finite."""
        norm = float(blocks[0].norm())
        if self.largest_norm is not None and norm > self.largest_norm:
            raise MalformedError(
                f"client {client} sent an update of norm {norm:.3g}, above {self.largest_norm:.3g}: it diverged, or "
                "wants to decide alone"
            )
