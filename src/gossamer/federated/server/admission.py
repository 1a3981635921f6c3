"""Admission: rejects implausible reports and contributions, and counts tasks without a contribution."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms.strategies.federated_rules import FederatedStrategy, LocalWork
from gossamer.base.ops import Payload, payload_bytes
from gossamer.base.peer_ops import Peer
from gossamer.errors import MalformedError, require
from gossamer.events import notice
from gossamer.federated.messages import Report, decode
from gossamer.federated.server.aggregation import ContributionSum, HeldContribution, Sizes

REMEMBERED = 101  # sizes of admitted contributions, for the median
FEWEST = 10  # sizes for a meaningful median
SLACK_BYTES = 4096  # beyond the size of a contribution's tensors
LONGEST_NAME = 64  # characters of a metric


@dataclass(frozen=True, kw_only=True)
class ContributionLimits:
    """Limits on the reports and contributions of one device."""

    most_samples: int = 10**9
    most_steps: int = 10**9
    most_metrics: int = 256
    most_parts: int = 1 << 16
    most_about: int = 1 << 20  # characters of a report
    most_bytes: int | None = None  # of a contribution; None: the size with the recipe's compressor plus SLACK_BYTES
    largest_norm: float | None = None  # of a pseudo-gradient; None: any finite one
    largest_ratio: float | None = 1000.0  # of a norm, weight or number of steps to the median; None: any

    def __post_init__(self) -> None:
        for name in ("most_bytes", "largest_norm", "largest_ratio"):
            value = getattr(self, name)
            require(value is None or value > 0, f"{name} must be above 0, got {value}")


class ContributionAdmission:
    """Checks contributions against limits and against the median of other contributions.

    The first contributions are held until there are FEWEST of them, or until their round is complete, and are then
    compared with each other. Otherwise a single first contribution could set the scale and stay in the model.
    """

    def __init__(self, limits: ContributionLimits, strategy: FederatedStrategy) -> None:
        self.limits, self._strategy, self._needs_steps = limits, strategy, strategy.needs_steps
        self._known: deque[Sizes] = deque(maxlen=REMEMBERED)  # of those that were admitted last

    def most_bytes(self, expected: int) -> int:
        """Largest allowed size, for an expected size of a contribution."""
        return expected + SLACK_BYTES if self.limits.most_bytes is None else self.limits.most_bytes

    def part_number(self, about: str, payload: Payload) -> int:
        """The number of a part. Raises MalformedError."""
        if not (about.isascii() and about.isdecimal() and len(about) <= 9) or len(payload) != 1:
            raise MalformedError(f"it sent {len(payload)} tensors as part {about[:20]!r} of a contribution")
        if int(about) >= self.limits.most_parts:
            raise MalformedError(f"it sent part {int(about)}, but a contribution has at most {self.limits.most_parts}")
        return int(about)

    def report(self, about: str, sender: Peer, layout: str) -> Report:
        """Read a report. layout: of this federation's model. Raises MalformedError."""
        limits = self.limits
        if len(about) > limits.most_about:
            raise MalformedError(f"its report has {len(about)} characters, but at most {limits.most_about} are allowed")
        report = decode(about, Report, sender)
        if report.failed:
            raise MalformedError(f"it could not train: {report.failed[:300]}")
        if report.layout != layout:
            raise MalformedError(
                f"it trained another model ({report.layout[:60]!r}, but this federation's is {layout!r}): run the same "
                "script everywhere"
            )
        for name, value, least, most in (
            ("samples", report.samples, 0, limits.most_samples),
            ("steps", report.steps, 0, limits.most_steps),
            ("parts", report.parts, 0, limits.most_parts),
            ("metrics", len(report.metrics), 0, limits.most_metrics),
        ):
            if not least <= value <= most:
                raise MalformedError(f"it claims {value} {name}, but the range is {least} to {most}")
        for name in report.metrics:
            if len(name) > LONGEST_NAME or not name.isprintable():
                raise MalformedError(
                    f"it names a metric {name[:LONGEST_NAME]!r}, but names must have at most {LONGEST_NAME} printable "
                    "characters"
                )
        asked = self._strategy.local_steps
        if asked is not None and self._needs_steps and report.steps > asked:
            raise MalformedError(
                f"it claims {report.steps} steps, but the recipe sets local_steps={asked}: take batches from "
                "round.batches(loader), and make one step with each"
            )
        return report

    def check_size(self, payload: Payload, most_bytes: int) -> None:
        """Raises MalformedError for a payload that is too large for the recipe."""
        if payload_bytes(payload) > most_bytes:
            raise MalformedError(
                f"it sent {payload_bytes(payload)} bytes, but a contribution has at most {most_bytes} with this "
                "federation's recipe: it runs another recipe, or tries to fill the server's memory"
            )

    def admit(
        self, into: ContributionSum, client: int, blocks: Sequence[Tensor], weight: float, work: LocalWork
    ) -> None:
        """Add a contribution, or hold it for comparison.

        Args:
            into: the sum of this round.
            client: number of the device.
            blocks: finite tensors.
            weight: above 0.
            work: the reported local work.

        Raises:
            MalformedError: a size is implausible; nothing is changed.
        """
        held = HeldContribution(tuple(blocks), weight, work.steps, self._sizes(blocks, work))
        if self.limits.largest_ratio is None:
            into.add(held.blocks, held.weight, held.steps)
        elif len(self._known) < FEWEST:
            into.held[client] = held
        else:
            self._check(held.sizes, self._largest(self._known))
            self._add(into, held)

    def compares(self, into: ContributionSum) -> bool:
        """Whether the held contributions can be compared now, without waiting for others."""
        return bool(into.held) and len(self._known) + len(into.held) >= FEWEST

    def compare(self, into: ContributionSum) -> dict[int, str]:
        """Add the held contributions that are plausible. Returns the reasons of refusals, by client."""
        held, into.held = into.held, {}
        largest = self._largest([*self._known, *(each.sizes for each in held.values())])
        refused = {}
        for client, each in held.items():
            try:
                self._check(each.sizes, largest)
                self._add(into, each)
            except MalformedError as error:
                refused[client] = str(error)
        return refused

    def _add(self, into: ContributionSum, held: HeldContribution) -> None:
        into.add(held.blocks, held.weight, held.steps)
        self._known.append(held.sizes)

    def _sizes(self, blocks: Sequence[Tensor], work: LocalWork) -> Sizes:
        """The norm of each block, the weight, and the steps if the strategy uses them. Raises MalformedError."""
        norms = [float(torch.linalg.vector_norm(block, dtype=torch.float64)) for block in blocks]
        steps = work.steps if self._needs_steps else 0
        sizes = (*norms, self._strategy.weight(work, 0), float(steps))
        self._check(sizes, (self.limits.largest_norm or inf, *[inf] * (len(sizes) - 1)))
        return sizes

    def _largest(self, known: Iterable[Sizes]) -> Sizes:
        """Largest admitted sizes, given other contributions."""
        assert self.limits.largest_ratio is not None
        return tuple(self.limits.largest_ratio * median(column) or inf for column in zip(*known, strict=True))

    def _check(self, sizes: Sizes, largest: Sizes) -> None:
        for place, (size, most) in enumerate(zip(sizes, largest, strict=True)):
            if not isfinite(size) or size > most:
                names = {0: "update's norm", len(sizes) - 2: "weight", len(sizes) - 1: "number of steps"}
                name = names.get(place, f"norm of tensor {place}")
                raise MalformedError(
                    f"its {name} is {size:.3g}, above {most:.3g}: it diverged, or tries to dominate the mean"
                )

    def state_dict(self) -> dict[str, Any]:
        return {"sizes": [list(sizes) for sizes in self._known]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known = deque((tuple(map(float, sizes)) for sizes in state.get("sizes", ())), maxlen=REMEMBERED)


TRIES = 100  # consecutive tasks without a contribution, after which a device is considered unable


class Attempts:
    """Counts failed attempts: tasks without a contribution, by device since it was last counted, and rounds without a
    version. Gives notice of both.

    fewest: smallest number of contributions per version.
    """

    def __init__(self, clients: int) -> None:
        """clients: of the whole federation."""
        self.fewest = 1
        self._clients = clients
        self._empty: Counter[int] = Counter()
        self._refused: Counter[int] = Counter()
        self._last_refusal = ""
        self._unable: set[int] = set()  # devices without an expected contribution
        self._given_up_in_a_row = 0  # rounds, since the last version

    def empty(self, client: int) -> None:
        """A device had nothing to train on."""
        self._empty[client] += 1
        self._review(client)

    def refused(self, client: int, why: str) -> None:
        """A contribution was refused. Gives notice of the first, second, fourth, ... refusal of a device."""
        self._refused[client] += 1
        self._last_refusal = why
        if _is_noticed(self._refused[client]):
            notice(why)
        self._review(client)

    def counted(self, clients: Iterable[int]) -> None:
        """A version was made of these devices' contributions."""
        self._given_up_in_a_row = 0
        for client in clients:
            self._empty.pop(client, None)
            self._refused.pop(client, None)
            self._unable.discard(client)

    def given_up(self, index: int, why: str, reports: int) -> None:
        """A round was given up. Gives notice of the first, second, fourth, ... in a row, to keep logs short."""
        self._given_up_in_a_row += 1
        count = self._given_up_in_a_row
        if _is_noticed(count):
            row = f", {count} in a row" * (count > 1)
            text = f"round {index} is given up{row}, and another is begun: {why} ({reports} reports)"
            also = self.summary()
            notice(f"{text}. {also}" if also else text)

    def leave_too_few(self, lost: Iterable[int] = ()) -> bool:
        """Whether too few devices remain for a version. lost: devices that will not return."""
        return self._clients - len(self._unable.union(lost)) < self.fewest

    def summary(self) -> str:
        """Reasons for missing contributions, in sentences; may be empty."""
        found = []
        if self._empty:
            found.append(
                f"{len(self._empty)} of {self._clients} devices had nothing to train on: the client function returned "
                "Update(samples=0), or its loader has no batch. Give these devices data."
            )
        if self._refused:
            found.append(
                f"{len(self._refused)} of {self._clients} devices were refused. The last: {self._last_refusal}."
            )
        return " ".join(found)

    def _review(self, client: int) -> None:
        could = not self.leave_too_few()
        if self._empty[client] + self._refused[client] >= TRIES:
            self._unable.add(client)
            if could and self.leave_too_few():
                notice(f"No version can be made any more. {self.summary()}")


def _is_noticed(count: int) -> bool:
    """Whether `count` is a power of two."""
    return count & (count - 1) == 0
