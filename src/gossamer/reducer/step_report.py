"""Step report: what each rank reports at a step's end, all-gathered, so that all decide alike whether to commit."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.core.ops import AllGather

NOBODY = -1
HEAD = Struct("<dqiBB")  # weight, settings, first non-finite, presence, stop: the same on every machine

Flags = npt.NDArray[np.bool_]
NonFiniteOrigin = tuple[int | None, str]  # (rank, tensor); no rank where only the agreed mean was not finite


class Presence(IntEnum):
    """Why a rank takes part in a reduction."""

    OUT_OF_DATA = 0
    TRAINING = 1  # it has data
    SAVING = 2  # it has none now, and wants to save


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One rank's report at the end of a step."""

    weight: float  # of its batch
    presence: Presence
    settings: int  # a hash of the optimizer's hyperparameters
    first_nonfinite: int  # the place of the first tensor that was not finite, or NOBODY
    used: Flags  # by place: parameters that have a gradient
    moved: Flags  # by place: modules whose buffers changed
    stop: bool = False  # this rank was asked to end the run


@dataclass(frozen=True)
class StepDecision:
    """The decision that follows from all reports, the same on every rank."""

    reports: tuple[StepReport, ...]

    @property
    def weight(self) -> float:
        return sum(report.weight for report in self.reports)

    @property
    def active(self) -> tuple[int, ...]:
        """The ranks that had data."""
        return tuple(rank for rank, report in enumerate(self.reports) if report.presence == Presence.TRAINING)

    @property
    def presences(self) -> tuple[Presence, ...]:
        return tuple(report.presence for report in self.reports)

    @property
    def stop(self) -> bool:
        return any(report.stop for report in self.reports)

    @property
    def nonfinite(self) -> tuple[tuple[int, int], ...]:
        """(rank, place of a tensor) for every rank that met a number that is not finite."""
        return tuple(
            (rank, report.first_nonfinite)
            for rank, report in enumerate(self.reports)
            if report.first_nonfinite != NOBODY
        )

    @property
    def alike(self) -> bool:
        return len({report.settings for report in self.reports if report.presence == Presence.TRAINING}) <= 1

    @property
    def used(self) -> Flags:
        """The parameters that have a gradient on some rank."""
        flags: Flags = np.any([report.used for report in self.reports], axis=0)
        return flags

    @property
    def moved(self) -> Flags:
        """The modules whose buffers changed on some rank."""
        flags: Flags = np.any([report.moved for report in self.reports], axis=0)
        return flags


def control_bytes(parameter_tensors: int, buffer_groups: int = 0) -> int:
    """Payload bytes of a report: its head and two bitmaps."""
    return HEAD.size + -(-parameter_tensors // 8) + -(-buffer_groups // 8)


def exchange_reports(report: StepReport) -> Generator[AllGather, Any, StepDecision]:
    """All-gather the reports."""
    heard = yield AllGather((_encode(report),))
    return StepDecision(tuple(_decode(text, len(report.used), len(report.moved)) for (text,) in heard))


def _encode(report: StepReport) -> Tensor:
    head = HEAD.pack(report.weight, report.settings, report.first_nonfinite, report.presence, report.stop)
    bits = (np.packbits(flags).tobytes() for flags in (report.used, report.moved))
    return torch.frombuffer(bytearray(b"".join((head, *bits))), dtype=torch.uint8)


def _decode(text: Tensor, parameters: int, buffers: int) -> StepReport:
    raw = text.numpy()
    weight, settings, first_nonfinite, presence, stop = HEAD.unpack(raw[: HEAD.size].tobytes())
    split = HEAD.size + -(-parameters // 8)
    return StepReport(
        weight=weight,
        presence=Presence(presence),
        settings=settings,
        first_nonfinite=first_nonfinite,
        used=_bits(raw[HEAD.size : split], parameters),
        moved=_bits(raw[split:], buffers),
        stop=bool(stop),
    )


def _bits(raw: npt.NDArray[np.uint8], count: int) -> Flags:
    return np.unpackbits(raw, count=count).astype(bool)


def gather_first_batches(batch: int, weight: float) -> Generator[AllGather, Any, Sequence[tuple[int, float]]]:
    """The first operation of a session: each rank's first batch, as a hash, and its weight."""
    heard = yield AllGather(
        (torch.tensor([weight], dtype=torch.float64, device="cpu"), torch.tensor([batch], device="cpu"))
    )
    return [(int(theirs.item()), weights.item()) for weights, theirs in heard]


WEIGHT_BYTES = 8


def gather_weights(weight: float) -> Generator[AllGather, Any, float]:
    """The first operation of a step whose compressor has state: the sum of all weights."""
    heard = yield AllGather((torch.tensor([weight], dtype=torch.float64, device="cpu"),))
    return float(sum(theirs.item() for (theirs,) in heard))
