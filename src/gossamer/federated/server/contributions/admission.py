"""Admission: refuses reports and contributions that no honest device sends, before anything of them is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gossamer.core.ops import Payload, payload_bytes
from gossamer.core.peer_ops import Peer
from gossamer.errors import MalformedError, require
from gossamer.federated.messages import Report, decode

REMEMBERED = 101  # norms of contributions that were admitted, of which the median is taken
FEWEST = 10  # norms that have a median which says something
SLACK_BYTES = 4096  # beyond what a contribution's tensors have
LONGEST_NAME = 64  # characters of a metric


@dataclass(frozen=True, kw_only=True)
class ContributionLimits:
    """Limits on what one device may claim and send."""

    most_samples: int = 10**9
    most_steps: int = 10**9
    most_metrics: int = 256
    most_parts: int = 1 << 16
    most_about: int = 1 << 20  # characters of a report
    most_bytes: int | None = None  # of a contribution; None: what the recipe's compressor sends, and a little
    largest_norm: float | None = None  # of a pseudo-gradient; None: any finite one
    largest_ratio: float | None = 1000.0  # of a norm to the median of those admitted last; None: any

    def __post_init__(self) -> None:
        for name in ("most_bytes", "largest_norm", "largest_ratio"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name} is above 0, not {value}")


class ContributionAdmission:
    """Checks what devices send against limits, and against what others sent before."""

    def __init__(self, limits: ContributionLimits) -> None:
        self.limits = limits
        self._norms: deque[tuple[float, ...]] = deque(maxlen=REMEMBERED)  # of each block, by contribution

    def most_bytes(self, expected: int) -> int:
        """Of a contribution whose compressor sends `expected`."""
        return expected + SLACK_BYTES if self.limits.most_bytes is None else self.limits.most_bytes

    def part_number(self, about: str, payload: Payload) -> int:
        """The number of a part. Raises MalformedError."""
        if not (about.isascii() and about.isdecimal() and len(about) <= 9) or len(payload) != 1:
            raise MalformedError(f"it sent {len(payload)} tensors as part {about[:20]!r} of a contribution")
        if int(about) >= self.limits.most_parts:
            raise MalformedError(f"it sent part {int(about)}, and a contribution has at most {self.limits.most_parts}")
        return int(about)

    def report(self, about: str, sender: Peer, layout: str) -> Report:
        """Read a report. layout: of this federation's model. Raises MalformedError."""
        limits = self.limits
        if len(about) > limits.most_about:
            raise MalformedError(f"its report has {len(about)} characters, and at most {limits.most_about} are read")
        report = decode(about, Report, sender)
        if report.failed:
            raise MalformedError(f"it could not train: {report.failed[:300]}")
        if report.layout != layout:
            raise MalformedError(
                f"it trained another model ({report.layout[:60]!r}, and this federation's is {layout!r}): run the same "
                "script everywhere"
            )
        for name, value, least, most in (
            ("samples", report.samples, 1, limits.most_samples),
            ("steps", report.steps, 0, limits.most_steps),
            ("parts", report.parts, 0, limits.most_parts),
            ("metrics", len(report.metrics), 0, limits.most_metrics),
        ):
            if not least <= value <= most:
                raise MalformedError(f"it claims {value} {name}, and between {least} and {most} are believed")
        for name in report.metrics:
            if len(name) > LONGEST_NAME or not name.isprintable():
                raise MalformedError(
                    f"it names a metric {name[:LONGEST_NAME]!r}, and names have at most {LONGEST_NAME} characters, "
                    "which can be printed"
                )
        return report

    def check_size(self, payload: Payload, most_bytes: int) -> None:
        """Raises MalformedError for a message that its compressor cannot have made."""
        if payload_bytes(payload) > most_bytes:
            raise MalformedError(
                f"it sent {payload_bytes(payload)} bytes, and a contribution has at most {most_bytes} with this "
                "federation's recipe: it runs another one, or wants to fill the server's memory"
            )

    def check_blocks(self, blocks: Sequence[Tensor]) -> None:
        """Raises MalformedError for norms that no honest device has. blocks: finite."""
        norms = tuple(float(torch.linalg.vector_norm(block, dtype=torch.float64)) for block in blocks)
        allowed = [self._largest(place) for place in range(len(norms))]
        for norm, largest in zip(norms, allowed, strict=True):
            if not isfinite(norm) or norm > largest:
                raise MalformedError(
                    f"its update has norm {norm:.3g}, above {largest:.3g}: it diverged, or wants to decide alone"
                )
        self._norms.append(norms)

    def _largest(self, place: int) -> float:
        """The largest norm of a block that is admitted."""
        limits = self.limits
        absolute = float("inf") if limits.largest_norm is None or place else limits.largest_norm
        if limits.largest_ratio is None or len(self._norms) < FEWEST:
            return absolute
        usual = median(norms[place] for norms in self._norms)
        return min(absolute, limits.largest_ratio * usual) if usual > 0 else absolute

    def state_dict(self) -> dict[str, Any]:
        return {"norms": [list(norms) for norms in self._norms]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._norms = deque((tuple(map(float, norms)) for norms in state["norms"]), maxlen=REMEMBERED)
