"""Run record: each rank's numbers, and one JSON record merged from them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from gossamer.version import __version__

Point = tuple[int, float, float]
Record = dict[str, Any]
NO_NETWORK: Record = {"network": None, "emulation": None}


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank's numbers over one session; seconds and bytes per step are means unless they say otherwise.

    Times per step leave out the warm-up (recorder.warm_up); bytes and totals count every step.
    """

    rank: int
    world: int
    recipe: str
    parameters: int
    steps: int
    skipped_steps: int
    seconds: float  # in all
    median_seconds: float  # a step, of the means over whole periods of a schedule
    p90_seconds: float
    compute_seconds: float
    waiting_seconds: float  # of the training thread, for the communication thread
    encode_seconds: float
    wire_seconds: float
    decode_seconds: float
    bytes_sent: float
    bytes_pulled: float = 0.0  # from parameter servers
    interface_bytes: float | None = None  # that the kernel counted, of all processes; None where it was not asked
    residual_bytes: int = 0  # of compressors' states
    bucket_bytes: int = 0
    peak_resident_bytes: int = 0
    digest: str | None = None  # of the parameters that all agree on; None where the session was not closed
    holds_merged: bool | None = None  # whether the rank's own model is what was merged; None as above
    metrics: dict[str, list[Point]] = field(default_factory=dict)  # (step, seconds since the session began, value)
    checkpoints: list[tuple[int, str]] = field(default_factory=list)  # (step, directory)
    servers: dict[str, Any] | None = None  # what parameter servers told at the end
    lost: tuple[int, ...] = ()  # ranks that began on this machine and left no record
    collectives: dict[str, str] = field(default_factory=dict)  # by bytes of a mean: which collective took it


def rank_path(directory: Path, rank: int) -> Path:
    return directory / f"record-{rank}.json"


def write_rank(directory: Path, record: RankRecord) -> None:
    write(rank_path(directory, record.rank), asdict(record))


def read_ranks(directory: Path) -> list[RankRecord]:
    """The records of this machine's ranks, in order, each with the ranks that began here and left none; empty where
    none had a session."""
    records = [RankRecord(**json.loads(path.read_text())) for path in directory.glob("record-*.json")]
    begun = {int(path.stem.split("-")[1]) for path in directory.glob("live-*.jsonl")}
    lost = tuple(sorted(begun - {record.rank for record in records}))
    return [replace(record, lost=lost) for record in sorted(records, key=lambda record: record.rank)]


def write(path: Path, record: Record) -> None:
    """Write JSON atomically, a line for every field; numbers that are not finite are null."""
    draft = path.with_name(path.name + ".draft")
    fields = (f"  {json.dumps(name)}: {json.dumps(_plain(value), allow_nan=False)}" for name, value in record.items())
    draft.write_text("{\n" + ",\n".join(fields) + "\n}\n", encoding="utf-8")
    os.replace(draft, path)


def merge(ranks: Sequence[RankRecord], network: Record | None = None) -> Record:
    """The run's record from its ranks' records: means over workers, the largest of memory.

    The times per step leave out the first ten steps, or a fifth of fewer than fifty, as warm-up; `seconds`,
    `steps` and bytes do not. network: the record's fields about the emulated network, where there is one.
    """
    first = ranks[0]
    metrics = _merge_metrics(ranks)

    def mean(name: str) -> float:
        return fmean(getattr(rank, name) for rank in ranks)

    def largest(name: str) -> int:
        return max(int(getattr(rank, name)) for rank in ranks)

    return {
        "gossamer": __version__,
        "recipe": first.recipe,
        "workers": first.world,
        "lost": list(first.lost),
        **(network or NO_NETWORK),
        "parameters": first.parameters,
        "steps": first.steps,
        "skipped_steps": first.skipped_steps,
        "seconds": max(rank.seconds for rank in ranks),
        "seconds_per_step": {"median": mean("median_seconds"), "p90": mean("p90_seconds")},
        "compute_seconds_per_step": mean("compute_seconds"),
        "waiting_seconds_per_step": mean("waiting_seconds"),
        "communication_seconds_per_step": {part: mean(f"{part}_seconds") for part in ("encode", "wire", "decode")},
        "bytes_sent_per_step": {"accounted": mean("bytes_sent"), "interface": _interface(ranks)},
        "memory_bytes": {
            "residuals": largest("residual_bytes"),
            "buckets": largest("bucket_bytes"),
            "peak_resident": largest("peak_resident_bytes"),
        },
        "metrics": metrics,
        "final": {name: points[-1][2] for name, points in metrics.items()},
        "checkpoints": [{"step": step, "directory": where} for step, where in _saved(ranks)],
        "collectives": dict(sorted(first.collectives.items(), key=lambda item: int(item[0]))),
        "servers": _servers(ranks, mean("bytes_pulled")),
        "workers_agree": _agree(ranks),
        "workers_hold_merged": _hold_merged(ranks),
    }


def _interface(ranks: Iterable[RankRecord]) -> float | None:
    counted = [rank.interface_bytes for rank in ranks]
    return None if None in counted else fmean(bytes_ for bytes_ in counted if bytes_ is not None)


def _agree(ranks: Sequence[RankRecord]) -> bool | None:
    """Whether the ranks that were not lost agree bitwise at the end; a session that was not closed has no digest.

    None, for unknown, where the ranks given do agree but others are on other machines.
    """
    digests = {rank.digest for rank in ranks}
    agree = len(digests) == 1 and None not in digests
    return None if agree and len(ranks) + len(ranks[0].lost) < ranks[0].world else agree


def _hold_merged(ranks: Sequence[RankRecord]) -> bool | None:
    """Whether every worker's own model is the merged one; None where a worker's record does not tell."""
    held = [rank.holds_merged for rank in ranks]
    return None if None in held else all(held)


def _servers(ranks: Sequence[RankRecord], bytes_pulled: float) -> Record | None:
    """What parameter servers told the last worker that left, and the bytes that all pulled; None without servers."""
    told = [rank.servers for rank in ranks if rank.servers is not None]
    if not told:
        return None
    return {"bytes_pulled_per_step": bytes_pulled, **max(told, key=lambda each: int(each["applied"]))}


def _saved(ranks: Iterable[RankRecord]) -> list[tuple[int, str]]:
    return sorted({(step, where) for rank in ranks for step, where in rank.checkpoints})


def _merge_metrics(ranks: Iterable[RankRecord]) -> dict[str, list[Point]]:
    """For each name and step, the mean over the ranks that logged it."""
    logged: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for rank in ranks:
        for name, points in rank.metrics.items():
            for step, seconds, value in points:
                number = float("nan") if value is None else value
                logged.setdefault(name, {}).setdefault(step, []).append((seconds, number))
    return {name: [_mean_point(*item) for item in sorted(steps.items())] for name, steps in logged.items()}


def _mean_point(step: int, heard: list[tuple[float, float]]) -> Point:
    seconds, values = zip(*heard, strict=True)
    return step, fmean(seconds), fmean(values)


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case float() if not isfinite(value):
            return None
        case _:
            return value
