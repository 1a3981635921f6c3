"""Step report: what each rank reports at a step's end, all-gathered, so that all decide alike whether to commit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.base.ops import AllGather

NOBODY, SHORT_OF_MEMORY = -1, -2
HEAD = Struct("<dqqqiBB")  # weight, settings, steps, sample, first non-finite, presence, wishes: alike on every machine
STOP, LOOK, LAP = 1, 2, 4  # wishes; above them the lap
LAPS = 64

Flags = npt.NDArray[np.bool_]
NonFiniteOrigin = tuple[int | None, str]  # (rank, tensor); no rank where only the agreed mean was not finite

Agreement = Callable[[NonFiniteOrigin | None], NonFiniteOrigin | None]


def unchanged(blame: NonFiniteOrigin | None) -> NonFiniteOrigin | None:
    """The agreement of a rank that holds the whole model."""
    return blame


class Presence(IntEnum):
    """Why a rank takes part in a reduction."""

    OUT_OF_DATA = 0
    TRAINING = 1  # it has data
    SAVING = 2  # it has none now: it called session.save(), and so on for the calls below
    ENDING = 3  # it will have none any more
    LOADING = 4
    SWITCHING = 5
    MERGING = 6
    ADDING = 7

    @property
    def call(self) -> str | None:
        """The call that needs every rank at the same step, as the loop writes it; None where there is none."""
        return CALLS.get(self)


CALLS = {
    Presence.SAVING: "session.save()",
    Presence.LOADING: "session.load()",
    Presence.SWITCHING: "session.switch()",
    Presence.MERGING: "session.averaged_parameters()",
    Presence.ADDING: "session.add_parameters()",
}


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One rank's report at the end of a step."""

    weight: float  # of its batch
    presence: Presence
    settings: int  # a hash of the optimizer's hyperparameters
    steps: int  # of the optimizer, before this one
    used: Flags  # by place: parameters that have a gradient
    moved: Flags  # by place: modules whose buffers changed
    first_nonfinite: int = NOBODY  # the place of the first tensor that was not finite, or SHORT_OF_MEMORY
    sample: int = 0  # a hash of a part of the parameters; see gossamer.train.reducer.parameter_check
    stop: bool = False  # this rank was asked to end the run
    look: bool = False  # it wants all to tell what they measured, since its steps have become slow
    lap: int = 0  # its position in its data, in half epochs, modulo LAPS


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
    def all_trained(self) -> bool:
        """Whether every rank had data, and goes on to its optimizer's step."""
        return len(self.active) == len(self.reports)

    @property
    def presences(self) -> tuple[Presence, ...]:
        return tuple(report.presence for report in self.reports)

    @property
    def stop(self) -> bool:
        return any(report.stop for report in self.reports)

    @property
    def look(self) -> bool:
        return any(report.look for report in self.reports)

    @property
    def nonfinite(self) -> tuple[tuple[int, int], ...]:
        """(rank, place of a tensor) for every rank that met a number that is not finite."""
        return tuple(
            (rank, report.first_nonfinite) for rank, report in enumerate(self.reports) if report.first_nonfinite >= 0
        )

    @property
    def short(self) -> bool:
        """Whether memory ran out on some rank, so that nobody makes the step."""
        return any(report.first_nonfinite == SHORT_OF_MEMORY for report in self.reports)

    @property
    def alike(self) -> bool:
        return len({report.settings for report in self.reports if report.presence == Presence.TRAINING}) <= 1

    @property
    def steps(self) -> Mapping[int, int]:
        """How many steps each rank that had data has made, by rank."""
        return {rank: self.reports[rank].steps for rank in self.active}

    @property
    def in_step(self) -> bool:
        """Whether they have made equally many: else what they sent does not belong together, and nobody uses it."""
        return len(set(self.steps.values())) <= 1

    @property
    def parted(self) -> tuple[int, ...]:
        """The ranks that had data, where their parameters are not the same, as far as they have looked."""
        alike = len({self.reports[rank].sample for rank in self.active}) <= 1
        return () if alike or not self.in_step else self.active

    @property
    def apart_in_data(self) -> Mapping[int, float]:
        """How far each rank that had data is ahead of the first, in epochs, where that is more than half of one."""
        laps = {rank: self.reports[rank].lap for rank in self.active}
        first = next(iter(laps.values()), 0)
        ahead = {rank: (lap - first + LAPS // 2) % LAPS - LAPS // 2 for rank, lap in laps.items()}
        apart = any(abs(more) >= 2 for more in ahead.values())
        return {rank: more / 2 for rank, more in ahead.items()} if apart else {}

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
    head = HEAD.pack(
        report.weight,
        report.settings,
        report.steps,
        report.sample,
        report.first_nonfinite,
        report.presence,
        STOP * report.stop | LOOK * report.look | LAP * (report.lap % LAPS),
    )
    bits = (np.packbits(flags).tobytes() for flags in (report.used, report.moved))
    return torch.frombuffer(bytearray(b"".join((head, *bits))), dtype=torch.uint8)


def _decode(text: Tensor, parameters: int, buffers: int) -> StepReport:
    raw = text.numpy()
    weight, settings, steps, sample, first_nonfinite, presence, wishes = HEAD.unpack(raw[: HEAD.size].tobytes())
    split = HEAD.size + -(-parameters // 8)
    return StepReport(
        weight=weight,
        presence=Presence(presence),
        settings=settings,
        steps=steps,
        sample=sample,
        first_nonfinite=first_nonfinite,
        used=_bits(raw[HEAD.size : split], parameters),
        moved=_bits(raw[split:], buffers),
        stop=bool(wishes & STOP),
        look=bool(wishes & LOOK),
        lap=wishes // LAP,
    )


def _bits(raw: npt.NDArray[np.uint8], count: int) -> Flags:
    return np.unpackbits(raw, count=count).astype(bool)


def gather_first_batches(batch: int, weight: float) -> Generator[AllGather, Any, Sequence[tuple[int, float]]]:
    """The first operation of a session: each rank's first batch, as a hash, and its weight."""
    heard = yield AllGather(
        (torch.tensor([weight], dtype=torch.float64, device="cpu"), torch.tensor([batch], device="cpu"))
    )
    return [(int(theirs.item()), weights.item()) for weights, theirs in heard]


STANDING_BYTES = 16


@dataclass(frozen=True)
class Standings:
    """What the ranks say before a step's first bucket leaves."""

    weight: float  # of all batches
    steps: tuple[int, ...]  # of the optimizer, by rank


def gather_standings(weight: float, steps: int) -> Generator[AllGather, Any, Standings]:
    """The first operation of a step whose compressor has state, or before which a rank was out of data."""
    heard = yield AllGather((torch.tensor([weight, steps], dtype=torch.float64, device="cpu"),))
    weights, made = zip(*(theirs.tolist() for (theirs,) in heard), strict=True)
    return Standings(float(sum(weights)), tuple(map(int, made)))
