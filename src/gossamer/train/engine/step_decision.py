"""Step report: each rank's report at the end of a step, and the common decision derived from all reports."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.base import rng
from gossamer.base.ops import AllGather
from gossamer.base.units import ranks_text
from gossamer.errors import MismatchError
from gossamer.events import notice

ALL_FINITE, SHORT_OF_MEMORY = -1, -2
PACE = Struct("<d")  # at the end of a report whose ranks share a step by speed
HEAD = Struct("<dqqqiBB")  # of a report, in the same byte order on every machine
FIELDS = np.dtype(  # the fields of HEAD
    [
        ("weight", "<f8"),
        ("settings", "<i8"),
        ("steps", "<i8"),
        ("sample", "<i8"),
        ("first_nonfinite", "<i4"),
        ("presence", "u1"),
        ("requests", "u1"),
    ]
)
STOP, LOOK, LAP = 1, 2, 4  # bits of the last field; the bits above them are the lap
LAPS = 64

Flags = npt.NDArray[np.bool_]
NO_FLAGS: Flags = np.zeros(0, dtype=bool)
NonFiniteOrigin = tuple[int | None, str]  # (rank, tensor); no rank if only the common mean was not finite

Agreement = Callable[[NonFiniteOrigin | None], NonFiniteOrigin | None]


def unchanged(blame: NonFiniteOrigin | None) -> NonFiniteOrigin | None:
    """The agreement of a rank that holds the whole model: its own value."""
    return blame


class Presence(IntEnum):
    """Why a rank joins a reduction."""

    OUT_OF_DATA = 0
    TRAINING = 1  # it has data
    SAVING = 2  # it has no data at the moment: it called session.save(); the calls below are similar
    ENDING = 3  # it will have no more data
    LOADING = 4
    SWITCHING = 5
    MERGING = 6
    ADDING = 7

    @property
    def call(self) -> str | None:
        """The call that needs every rank at the same step, as written in the loop, or None."""
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
    moved: Flags  # by place: modules with changed buffers
    first_nonfinite: int = ALL_FINITE  # the place of the first non-finite tensor, or SHORT_OF_MEMORY
    sample: int = 0  # a hash of a part of the parameters; see gossamer.train.engine.parameter_check
    stop: bool = False  # this rank requests the end of the run
    look: bool = False  # it requests the measurements of all ranks, since its steps have become slow
    lap: int = 0  # its position in its data, in half epochs, modulo LAPS
    part_seconds: float | None = None  # compute time of one part of a step, 0 if unknown; None: parts are equal


@dataclass(frozen=True, kw_only=True)
class StepDecision:
    """Decision derived from all reports, the same on every rank. "Active" ranks had data."""

    weight: float  # of all batches
    presences: tuple[Presence, ...]  # by rank
    active: tuple[int, ...]
    all_trained: bool  # every rank is active, and continues with its optimizer step
    stop: bool  # the run ends
    look: bool  # a rank requested the measurements of all ranks
    nonfinite: tuple[tuple[int, int], ...]  # (rank, place of a tensor) of non-finite values
    short: bool  # memory ran out on a rank, so no rank makes the step
    alike: bool  # active ranks have the same optimizer settings
    steps: Mapping[int, int]  # number of steps made by each active rank
    in_step: bool  # these are equal; otherwise the gradients do not match, and no rank uses them
    parted: tuple[int, ...]  # the active ranks, if the checksums of their parameters differ
    apart_in_data: Mapping[int, float]  # see `_apart`
    used: Flags  # parameters that have a gradient on some rank
    moved: Flags  # modules with buffers that changed on some rank
    part_seconds: tuple[float, ...] = ()  # by rank; empty if parts are equal


def control_bytes(parameter_tensors: int, buffer_groups: int = 0, *, by_speed: bool = False) -> int:
    """Payload bytes of a report: its head, two bitmaps, and the rank's speed if shares follow it."""
    return HEAD.size + -(-parameter_tensors // 8) + -(-buffer_groups // 8) + PACE.size * by_speed


def encode(report: StepReport) -> Tensor:
    head = HEAD.pack(
        report.weight,
        report.settings,
        report.steps,
        report.sample,
        report.first_nonfinite,
        report.presence,
        STOP * report.stop | LOOK * report.look | LAP * (report.lap % LAPS),
    )
    bits = np.packbits(report.used).tobytes(), np.packbits(report.moved).tobytes()
    pace = b"" if report.part_seconds is None else PACE.pack(report.part_seconds)
    return torch.frombuffer(bytearray(b"".join((head, *bits, pace))), dtype=torch.uint8)


def decide(received: Sequence[Tensor], own: StepReport) -> StepDecision:
    """Decode all ranks' reports at once. received: by rank, as encoded; own: this rank's, which has the same form."""
    raw, parameters, buffers = torch.stack([*received]).numpy(), len(own.used), len(own.moved)
    split = HEAD.size + -(-parameters // 8)
    end = split + -(-buffers // 8)
    paces = raw[:, end:].copy().view("<f8")[:, 0].tolist() if own.part_seconds is not None else ()
    heads = raw[:, : HEAD.size].copy().view(FIELDS)[:, 0]
    presence, first = heads["presence"], heads["first_nonfinite"]
    requests = int(np.bitwise_or.reduce(heads["requests"]))
    trained, found = presence == Presence.TRAINING, first >= 0
    active = tuple(np.flatnonzero(trained).tolist())
    steps = dict(zip(active, heads["steps"][trained].tolist(), strict=True))
    in_step, settings = len({*steps.values()}) <= 1, {*heads["settings"][trained].tolist()}
    samples, laps = {*heads["sample"][trained].tolist()}, (heads["requests"][trained] // LAP).tolist()
    return StepDecision(
        weight=sum(heads["weight"].tolist()),  # in rank order, for the same bits on every rank
        presences=tuple(map(Presence, presence.tolist())),
        active=active,
        all_trained=len(active) == len(received),
        stop=bool(requests & STOP),
        look=bool(requests & LOOK),
        nonfinite=tuple(zip(np.flatnonzero(found).tolist(), first[found].tolist(), strict=True)),
        short=bool((first == SHORT_OF_MEMORY).any()),
        alike=len(settings) <= 1,
        steps=steps,
        in_step=in_step,
        parted=active if in_step and len(samples) > 1 else (),
        apart_in_data=_apart(dict(zip(active, laps, strict=True))) if len({*laps}) > 1 else {},
        used=np.logical_or.reduce(np.unpackbits(raw[:, HEAD.size : split], axis=1, count=parameters), axis=0),
        moved=np.logical_or.reduce(np.unpackbits(raw[:, split:end], axis=1, count=buffers), axis=0),
        part_seconds=tuple(paces),
    )


def _apart(laps: Mapping[int, int]) -> Mapping[int, float]:
    """Lead of each rank over the first one, in epochs; empty unless some lead is more than half an epoch."""
    first = next(iter(laps.values()))
    ahead = {rank: (lap - first + LAPS // 2) % LAPS - LAPS // 2 for rank, lap in laps.items()}
    apart = any(abs(more) >= 2 for more in ahead.values())
    return {rank: more / 2 for rank, more in ahead.items()} if apart else {}


def gather_first_batches(batch: int, weight: float) -> Generator[AllGather, Any, Sequence[tuple[int, float]]]:
    """The first operation of a session: the hash of each rank's first batch, and its weight."""
    received = yield AllGather(
        (torch.tensor([weight], dtype=torch.float64, device="cpu"), torch.tensor([batch], device="cpu"))
    )
    return [(int(remote.item()), weights.item()) for weights, remote in received]


STANDING_BYTES = 16


@dataclass(frozen=True)
class Standings:
    """Weights and steps of the ranks, exchanged before a step's first bucket."""

    weight: float  # of all batches
    steps: tuple[int, ...]  # of the optimizer, by rank


def gather_standings(weight: float, steps: int) -> Generator[AllGather, Any, Standings]:
    """The first operation of a step if its compressor has state, or if a rank was out of data before."""
    received = yield AllGather((torch.tensor([weight, steps], dtype=torch.float64, device="cpu"),))
    weights, made = zip(*(remote.tolist() for (remote,) in received), strict=True)
    return Standings(float(sum(weights)), tuple(map(int, made)))


def by_value(values: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(f"{value!r} on {ranks_text(each)}" for value, each in ranks.items())


def settings(optimizer: Optimizer | None, scale: float | None = None, *, weighted: bool) -> str:
    """Settings of the loop as text, for comparison between ranks.

    Args:
        optimizer: Its hyperparameters, group by group: learning rates, momenta, decays. None if ranks may differ.
        scale: Loss scale.
        weighted: Whether the loop sets batch weights.
    """
    weights = f"session.set_batch_weight(...) was {'' if weighted else 'not '}called"
    groups = []
    for group in () if optimizer is None else optimizer.param_groups:
        numbers = []
        for key, value in group.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                continue  # not a setting, but for example a buffer of an optimizer that communicates itself
            if isinstance(value, (bool, int, float, tuple, Tensor)):
                numbers.append(f"{key}={float(value) if isinstance(value, Tensor) else value!r}")
        groups.append(", ".join(numbers))
    return f"{'; '.join(groups)}; loss scale={scale}\n{weights}" if groups else f"\n{weights}"


@lru_cache(maxsize=4)
def settings_hash(settings: str) -> int:
    """The hash of `settings` in a report. Cached, since most steps have the settings of the step before."""
    return rng.address(settings)


def refuse_newcomers(texts: Sequence[str], joined: Sequence[bool], active: Sequence[int], rank: int) -> None:
    """Raise MismatchError if the members that started a run differ; otherwise only on new workers that differ.

    Args:
        texts: results of `settings`, by rank.
        joined: whether each rank joined later.
        active: the ranks that train.
        rank: this rank.
    """
    began = [each for each in active if not joined[each]] or list(active[:1])
    if len({texts[each] for each in began}) > 1:
        compare_settings(texts)
    odd = [each for each in active if texts[each] != texts[began[0]]]
    if rank in odd:
        compare_settings([texts[began[0]] if each not in odd else texts[each] for each in range(len(texts))])
    if odd and rank == began[0]:
        notice(
            f"{ranks_text(odd)} joined this run with other optimizer settings and "
            f"cannot continue: {by_value([text.rsplit(chr(10), 1)[0] for text in texts])}. The other ranks continue"
        )


def compare_settings(texts: Sequence[str]) -> None:
    """Raise MismatchError for differing results of `settings`, by rank."""
    settings, weights = zip(*(text.rsplit("\n", 1) for text in texts), strict=True)
    if len({*weights}) > 1:
        raise MismatchError(
            "only some ranks have set a batch weight. The default weight is 1, which is almost nothing relative to a "
            f"number of samples: {by_value(weights)}. Write session.set_batch_weight(len(batch)) before backward() on "
            "every rank, or on no rank."
        )
    raise MismatchError(
        "the optimizer settings of the ranks differ, so they would take different steps from the same gradient and "
        f"their parameters would diverge: {by_value(settings)}. Step learning-rate schedulers equally often on every "
        "rank; if ranks have different numbers of batches, once per epoch instead of once per batch. Give a scheduler "
        "of a metric the same value on every rank: scheduler.step(gossamer.mean(loss)). In an elastic run, track them "
        "so that new workers receive their state: session.track(scheduler=scheduler)."
    )
