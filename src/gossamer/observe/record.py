"""Run record: one JSON record, merged from the records of a run's ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from gossamer.base import bounded_file
from gossamer.base.bounded_mean import mean_of
from gossamer.base.differing_tensor import differing_tensor
from gossamer.base.json_text import json_text
from gossamer.events import Ended
from gossamer.observe.event_log import read_entries, truncated_path
from gossamer.observe.rank_record import Point, RankRecord, replay
from gossamer.version import __version__

Record = dict[str, Any]
MOST_RECORD_BYTES = 2**31  # of a record to read: a run of months
NO_NETWORK: Record = {"network": None, "emulation": None}


def network_text(record: Record) -> str | None:
    """For example: "100mbit,20ms (emulated: switch)". None without an emulated network."""
    return f"{record['network']} (emulated: {record['emulation']})" if record.get("network") else None


def read_ranks(directory: Path) -> list[RankRecord]:
    """The records of this machine's ranks, in order, for any end of the run; empty if no rank had a session.

    Each record lists the ranks of this machine without a complete record: ranks that were killed, failed or evicted, or
    whose logs were truncated by a full disk."""
    found = {_rank(path): replay(read_entries(path)) for path in directory.glob("events-*.jsonl")}
    partial = sorted(rank for rank, record in found.items() if record is None or not record.complete)
    truncated = tuple(rank for rank in partial if truncated_path(directory, rank).exists())
    lost = tuple(rank for rank in partial if rank not in truncated)
    records = [replace(record, lost=lost, truncated=truncated) for record in found.values() if record is not None]
    return sorted(records, key=lambda record: record.rank)


def discard_logs(directory: Path) -> None:
    """Remove event logs after their record was written, or if they have no session."""
    for path in directory.glob("events-*.jsonl"):
        path.unlink(missing_ok=True)


def recover(path: Path) -> Record | None:
    """The record of a killed run, from the newest event logs in its folder of logs, or from one event log; None if no
    session trained."""
    if not path.is_dir():
        record = replay(read_entries(path))
        return None if record is None else merge([record], ended="interrupted")
    places = sorted((path, *path.glob(".run-*")), key=lambda place: place.stat().st_mtime, reverse=True)
    found = next((ranks for place in places if (ranks := read_ranks(place))), None)
    return None if found is None else merge(found, ended="interrupted")


def has_newer_logs(folder: Path, kept: Path) -> bool:
    """Whether event logs in a run's folder are newer than the record `kept` there: a later run with the same folder was
    killed, or trains."""
    if not folder.is_dir() or not kept.exists():
        return False
    written = kept.stat().st_mtime_ns
    logs = (log for place in (folder, *folder.glob(".run-*")) for log in place.glob("events-*.jsonl"))
    return any(log.stat().st_mtime_ns > written for log in logs)


def _rank(path: Path) -> int:
    return int(path.stem.split("-")[1])


def write(path: Path, record: Record) -> None:
    """Write JSON atomically, one field per line; non-finite numbers are null."""
    fields = (f"  {json.dumps(name)}: {json_text(value)}" for name, value in record.items())
    bounded_file.write_whole(path, "{\n" + ",\n".join(fields) + "\n}\n")


def merge(
    ranks: Sequence[RankRecord], network: Record | None = None, ended: Ended = "finished", preempted: str = ""
) -> Record:
    """Merge the records of ranks into the run's record: means over workers, maxima of memory.

    Times per step exclude the first ten steps, or a fifth of fewer than fifty, as warm-up; `seconds`, `steps` and bytes
    include them. Workers that a finished run lost, or that left it, are listed and excluded; after any other end all
    records count, up to the last second or so. If workers joined late or restarted, the run's times are those of the
    first ones; for a restarted worker the last start counts.

    Args:
        ranks: records of this machine's ranks, or of all.
        network: fields of the record about the emulated network.
        ended: how the run ended.
        preempted: notice of the preemption that ended it; empty without one.
    """
    truncated = ranks[0].truncated
    complete, all_ranks = [rank for rank in ranks if rank.complete or rank.rank in truncated], ranks
    lost = ranks[0].lost if ended == "finished" and complete else ()
    ranks = complete if lost else ranks
    gone = [rank.rank for rank in ranks if rank.left]
    if ended == "finished" and len(gone) < len(ranks):
        ranks = [rank for rank in ranks if not rank.left]
    first = min(ranks, key=lambda rank: (rank.resumed_at, rank.rank))
    metrics, tensors = _merge_metrics(ranks), {rank.rank: rank.tensors for rank in ranks}

    def mean(name: str) -> float:
        return fmean(getattr(rank, name) for rank in ranks)

    def largest(name: str) -> int:
        return max(int(getattr(rank, name)) for rank in ranks)

    return {
        "gossamer": __version__,
        "recipe": first.recipe,
        "workers": first.world,
        "ended": ended,
        "preempted": preempted or None,
        "lost": list(lost),
        "left": gone,
        "truncated": list(truncated),
        "lost_residuals": _lost_residuals(all_ranks, {*lost, *gone} if ended == "finished" else set()),
        **(network or NO_NETWORK),
        "sessions": max(rank.sessions for rank in ranks),
        "parameters": first.parameters,
        "steps": first.steps,
        "resumed_at": first.resumed_at,
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
        "switches": [{"step": step, "recipe": recipe, "reason": why} for step, recipe, why in first.switches],
        "collectives": dict(sorted(first.collectives.items(), key=lambda item: int(item[0]))),
        "servers": _servers(ranks, mean("bytes_pulled")),
        "workers_agree": (agree := _agree(ranks, len(lost) + len(gone), ended)),
        "differing_tensor": None if agree is not False else _differing(first, tensors),
        "workers_hold_merged": _hold_merged(ranks),
    }


def _differing(first: RankRecord, tensors: Mapping[int, Mapping[str, str]]) -> Record | None:
    """The tensor that differs between ranks, with `frozen` if it is a parameter with requires_grad=False that the
    script changed."""
    found = first.differing or differing_tensor(tensors)
    return {**found, "frozen": True} if found and found["name"] in first.changed_frozen else found


def _lost_residuals(ranks: Iterable[RankRecord], gone: Set[int]) -> list[Record]:
    """Last reported residuals of workers of an elastic run that were lost or left: of restarted workers, and of the
    ranks in `gone`."""
    known_ranks = [
        (rank.rank, residual)
        for rank in ranks
        for residual in (*rank.lost_residuals, *([rank.residual] if rank.residual and rank.rank in gone else []))
    ]
    return [{"rank": rank, **residual} for rank, residual in sorted(known_ranks, key=lambda each: int(each[1]["step"]))]


def _interface(ranks: Iterable[RankRecord]) -> float | None:
    counted = [rank.interface_bytes for rank in ranks]
    return None if None in counted else fmean(bytes_ for bytes_ in counted if bytes_ is not None)


def _agree(ranks: Sequence[RankRecord], lost: int, ended: Ended) -> bool | None:
    """Whether the final models of the ranks that were neither lost nor left are bitwise equal.

    None if unknown: the run did not finish, or the given ranks agree but others have truncated logs, or are on other
    machines and sent no hash in time. A session that was not closed has no digest.
    """
    if ended != "finished":
        return None
    known = [rank for rank in ranks if rank.digest is not None or rank.rank not in rank.truncated]
    digests = {rank.digest for rank in known}
    agree = len(digests) <= 1 and None not in digests
    if not agree or len(known) + lost >= ranks[0].world:
        return agree
    known_ranks = {rank.agrees for rank in known}
    return known_ranks.pop() if len(known_ranks) == 1 else False if False in known_ranks else None


def _hold_merged(ranks: Sequence[RankRecord]) -> bool | None:
    """Whether every worker's own model is the merged one; None if a record lacks it."""
    held = [rank.holds_merged for rank in ranks]
    return None if None in held else all(held)


def _servers(ranks: Sequence[RankRecord], bytes_pulled: float) -> Record | None:
    """Final report of the parameter servers, and the bytes pulled by all workers; None without servers."""
    known_ranks = [rank.servers for rank in ranks if rank.servers is not None]
    if not known_ranks:
        return None
    return {"bytes_pulled_per_step": bytes_pulled, **max(known_ranks, key=lambda each: int(each["applied"]))}


def _saved(ranks: Iterable[RankRecord]) -> list[tuple[int, str]]:
    return sorted({(step, where) for rank in ranks for step, where in rank.checkpoints})


def _merge_metrics(ranks: Iterable[RankRecord]) -> dict[str, list[Point]]:
    """For each name and step, the mean over the ranks that logged it.

    Seconds count from each rank's own begin. Those of late ranks are ignored for steps that other ranks logged.
    """
    ranks = sorted(ranks, key=lambda rank: rank.resumed_at)
    logged: dict[str, dict[int, list[tuple[float, float, int]]]] = {}
    for rank in ranks:
        for name, points in rank.metrics.items():
            for step, seconds, value in points:
                number = float("nan") if value is None else value
                logged.setdefault(name, {}).setdefault(step, []).append((seconds, number, rank.resumed_at))
    return {name: [_mean_point(*item) for item in sorted(steps.items())] for name, steps in logged.items()}


def _mean_point(step: int, received: list[tuple[float, float, int]]) -> Point:
    began = received[0][2]
    return step, fmean(each[0] for each in received if each[2] == began), mean_of(each[1] for each in received)
