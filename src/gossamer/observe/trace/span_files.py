"""Span files: reads what each process of a run recorded, also where its end is torn."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.base import bounded_file
from gossamer.base.tracing.record_format import FIELDS, MAGIC, RECORD, SUFFIX, VERSION, SpanKind
from gossamer.errors import GossamerError

Records = NDArray[Any]  # of FIELDS
NO_TRACE = (
    "{folder} holds no trace: there is no file *{suffix} in it. Record one: "
    "gossamer run --trace all SCRIPT, or --trace 100:110 for these steps alone"
)
MOST_FILE_BYTES = 2**31  # a process writes half as much, at most
Key = tuple[int, ...]  # of an operation: the same in all processes that made it


@dataclass(frozen=True)
class ProcessSpans:
    """What one process recorded. Moments are those of its own clock."""

    path: Path
    rank: int
    world: int
    attempt: int
    pid: int
    host: str
    clock: str
    moment: float  # of its clock, when it was `wall` seconds of unix time
    wall: float
    records: Records
    torn_bytes: int  # behind the last whole record

    def of(self, *kinds: SpanKind) -> Records:
        return self.records[np.isin(self.records["kind"], kinds)]

    @cached_property
    def operations(self) -> dict[Key, tuple[float, float, int]]:
        """When each collective operation began and was answered here, and whose part the answer holds.

        One that was made again, because the group broke, began first when it began for the first time, and is over when
        it is over for the last: both hold whoever has made it how often.
        """
        found: dict[Key, tuple[float, float, int]] = {}
        for each in self.of(SpanKind.OPERATION):
            key = self.key_of(each)
            began, ended, peers = found.get(key, (np.inf, -np.inf, 0))
            found[key] = min(began, each["begin"]), max(ended, each["end"]), int(each["peers"]) | peers
        return found

    @cached_property
    def _groups(self) -> dict[int, tuple[int, int]]:
        """(first rank, ranks) by channel."""
        return {int(each["channel"]): (int(each["number"]), int(each["nbytes"])) for each in self.of(SpanKind.CHANNEL)}

    def key_of(self, operation: Any) -> Key:
        """Of a record."""
        channel, number = int(operation["channel"]), int(operation["number"])
        first, world = self._groups.get(channel, (0, self.world))  # torn, where it is not there
        # Where members change, a process that was started again goes on among others that were not
        return (self.attempt, channel, first, world, number) if world else (-1, -1, 0, 0, number)

    @property
    def name(self) -> str:
        return f"rank {self.rank}" + (f", start {self.attempt + 1}" if self.attempt else "")


def read_span_file(path: Path) -> ProcessSpans:
    """Raises GossamerError where it is none."""
    try:
        content = bounded_file.read_bytes(path, MOST_FILE_BYTES)
    except ValueError as problem:
        raise GossamerError(f"{problem}, and spans of a process take less. Delete it to trace the others") from None
    line, _, packed = content.partition(b"\n")
    try:
        about = json.loads(line)
        if about["format"] != MAGIC:
            raise ValueError("another format")
        if about["version"] > VERSION:
            raise GossamerError(
                f"{path} was written by a newer version of this library, which this one cannot read: "
                "pip install -U gossamer"
            )
        names = ("rank", "world", "attempt", "pid", "host", "clock", "moment", "wall")
        told = {name: about[name] for name in names}
    except (ValueError, KeyError, TypeError):
        raise GossamerError(
            f"{path} is no file of spans, or it was torn before its first line was whole. Delete it to trace the others"
        ) from None
    whole = len(packed) // RECORD.size
    records = np.frombuffer(packed, dtype=np.dtype(FIELDS), count=whole)
    sound = np.isfinite(records["begin"]) & (records["end"] >= records["begin"]) & (records["kind"] > 0)
    return ProcessSpans(path=path, records=records[sound], torn_bytes=len(packed) - whole * RECORD.size, **told)


def read_run(folder: Path) -> list[ProcessSpans]:
    """All processes of a run, by rank and start. Raises GossamerError where there is none."""
    paths = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    if not paths:
        raise GossamerError(NO_TRACE.format(folder=folder, suffix=SUFFIX))
    found = [read_span_file(path) for path in paths if path.stat().st_size]
    if not found:
        raise GossamerError(f"all files of spans in {folder} are empty: the run ended before it began to train")
    return sorted(found, key=lambda each: (each.rank, each.attempt, each.wall))


def missing_ranks(processes: list[ProcessSpans]) -> list[int]:
    """Ranks that took part and left no file here, as where another machine holds it."""
    there = {each.rank for each in processes}
    return sorted(set(range(max(each.world for each in processes))) - there)
