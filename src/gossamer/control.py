"""The last word of a step: what every rank must know before any of them commits."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from gossamer.words import Gather, Payload

NOBODY = -1


class Presence(IntEnum):
    """Why a rank takes part in an exchange: it has data; it has run out; it has none now and wants to save."""

    GONE = 0
    TRAINING = 1
    SAVING = 2


@dataclass(frozen=True, kw_only=True)
class Report:
    """What one rank says at the end of a step.

    weight: of its batch; presence: why it takes part; settings: a hash of the optimizer's hyperparameters; culprit: the
    place of the first tensor that was not finite, or NOBODY; used, moved: which parameters have a gradient and which
    modules' buffers changed, by place.
    """

    weight: float
    presence: Presence
    settings: int
    culprit: int
    used: tuple[bool, ...]
    moved: tuple[bool, ...]


@dataclass(frozen=True)
class Verdict:
    """What all ranks conclude from all reports, the same everywhere."""

    reports: tuple[Report, ...]

    @property
    def weight(self) -> float:
        return sum(report.weight for report in self.reports)

    @property
    def active(self) -> tuple[int, ...]:
        """The ranks that had data."""
        return self.present(Presence.TRAINING)

    def present(self, presence: Presence) -> tuple[int, ...]:
        return tuple(rank for rank, report in enumerate(self.reports) if report.presence == presence)

    @property
    def culprits(self) -> tuple[tuple[int, int], ...]:
        """(rank, place of a tensor) for every rank that met a number that is not finite."""
        return tuple((rank, report.culprit) for rank, report in enumerate(self.reports) if report.culprit != NOBODY)

    @property
    def alike(self) -> bool:
        return len({report.settings for report in self.reports if report.presence == Presence.TRAINING}) <= 1

    @property
    def used(self) -> list[bool]:
        return [any(bits) for bits in zip(*(report.used for report in self.reports), strict=True)]

    @property
    def moved(self) -> list[bool]:
        return [any(bits) for bits in zip(*(report.moved for report in self.reports), strict=True)]


def control_bytes(parameter_tensors: int, buffer_groups: int = 0) -> int:
    """Payload bytes of a report: weight and settings 8 each, culprit 4, presence 1, and two bitmaps."""
    return 21 + -(-parameter_tensors // 8) + -(-buffer_groups // 8)


def conclude(report: Report) -> Generator[Gather, Any, Verdict]:
    """Tell everyone my report, hear theirs."""
    heard = yield Gather(_encode(report))
    return Verdict(tuple(_decode(payload, len(report.used), len(report.moved)) for payload in heard))


def _encode(report: Report) -> Payload:
    bits = np.concatenate([np.packbits(np.array(flags, dtype=bool)) for flags in (report.used, report.moved)])
    return (
        torch.tensor([report.weight], dtype=torch.float64),
        torch.tensor([report.settings], dtype=torch.int64),
        torch.tensor([report.culprit], dtype=torch.int32),
        torch.from_numpy(np.concatenate([np.array([report.presence], dtype=np.uint8), bits])),
    )


def _decode(payload: Payload, parameters: int, buffers: int) -> Report:
    weight, settings, culprit, flags = payload
    raw = flags.numpy()
    split = 1 + -(-parameters // 8)
    return Report(
        weight=weight.item(),
        presence=Presence(raw[0]),
        settings=int(settings.item()),
        culprit=int(culprit.item()),
        used=_bits(raw[1:split], parameters),
        moved=_bits(raw[split:], buffers),
    )


def _bits(raw: np.ndarray[Any, np.dtype[np.uint8]], count: int) -> tuple[bool, ...]:
    return tuple(map(bool, np.unpackbits(raw, count=count)))


def first_batches(batch: int, weight: float) -> Generator[Gather, Any, Sequence[tuple[int, float]]]:
    """The first word of a session: a hash of everyone's first batch, and the weight of it."""
    heard = yield Gather((torch.tensor([weight], dtype=torch.float64), torch.tensor([batch])))
    return [(int(theirs.item()), weights.item()) for weights, theirs in heard]
