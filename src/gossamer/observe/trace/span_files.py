"""Span files: reads the recorded spans of each process of a run, and the operators recorded by torch.profiler.

A span file may be truncated. torch counts microseconds from an arbitrary time. Its file contains a slice named by the
process's clock at the slice's begin; the difference to it places all others.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gossamer.base import bounded_file
from gossamer.base.json_text import read_json
from gossamer.base.spans.record_format import (
    CLOCK_MARK,
    FIELDS,
    MAGIC,
    OPERATORS_SUFFIX,
    RECORD,
    SUFFIX,
    VERSION,
    SpanKind,
)
from gossamer.errors import GossamerError

Records = NDArray[Any]  # of FIELDS
NO_TRACE = (
    "{folder} has no trace: there is no file *{suffix} in it. Record one: "
    "gossamer run --trace all SCRIPT, or --trace 100:110 for these steps only"
)
MOST_FILE_BYTES = 2**31  # a process writes at most half of it
MOST_SECONDS = 1e10  # of a clock, 300 years
Key = tuple[int, ...]  # of an operation, the same in all of its processes


@dataclass(frozen=True)
class ProcessSpans:
    """Recorded spans of one process. Times are those of its own clock."""

    path: Path
    rank: int
    world: int
    attempt: int
    pid: int
    host: str
    clock: str
    moment: float  # time of its clock at `wall` unix seconds
    wall: float
    records: Records
    torn_bytes: int  # after the last complete record
    run: str = ""  # name that all processes of a run share; empty if no launcher named it

    def of(self, *kinds: SpanKind) -> Records:
        return self.records[np.isin(self.records["kind"], kinds)]

    @cached_property
    def operations(self) -> dict[Key, tuple[float, float, int]]:
        """Begin and end of each collective operation here, and the ranks that contribute to its answer.

        An operation that was repeated, because the group broke, lasts from its first begin to its last end; both are
        valid bounds for any number of repetitions on other ranks.
        """
        found: dict[Key, tuple[float, float, int]] = {}
        for each in self.of(SpanKind.OPERATION):
            key = self.key_of(each)
            began, ended, peers = found.get(key, (np.inf, -np.inf, 0))
            found[key] = min(began, each["begin"]), max(ended, each["end"]), int(each["peers"]) | peers
        return found

    @cached_property
    def ended(self) -> float:
        """Unix time of the last record."""
        return self.wall + (float(self.records["end"].max()) - self.moment if len(self.records) else 0.0)

    @property
    def is_elastic(self) -> bool:
        """Whether ranks change in its run."""
        return any(not world for _, world in self._groups.values())

    @cached_property
    def _groups(self) -> dict[int, tuple[int, int]]:
        """(first rank, ranks) by channel."""
        return {int(each["channel"]): (int(each["number"]), int(each["nbytes"])) for each in self.of(SpanKind.CHANNEL)}

    def key_of(self, operation: Any) -> Key:
        """Key of an operation's record."""
        channel, number = int(operation["channel"]), int(operation["number"])
        first, world = self._groups.get(channel, (0, self.world))  # missing in a truncated file
        # In an elastic run a restarted process works with others that were not restarted
        return (self.attempt, channel, first, world, number) if world else (-1, -1, 0, 0, number)

    @property
    def name(self) -> str:
        return f"rank {self.rank}" + (f", start {self.attempt + 1}" if self.attempt else "")


def read_span_file(path: Path) -> ProcessSpans:
    """Read one file. Raises GossamerError if it is invalid."""
    try:
        content = bounded_file.read_bytes(path, MOST_FILE_BYTES)
    except ValueError as problem:
        raise GossamerError(f"{problem}, which is too large for spans. Delete it to trace the others") from None
    line, _, packed = content.partition(b"\n")
    try:
        about = read_json(line)
        if about["format"] != MAGIC:
            raise ValueError("another format")
        if about["version"] > VERSION:
            raise GossamerError(
                f"{path} was written by a newer version of gossamer, which this version cannot read: "
                "pip install -U gossamer"
            )
        names = ("rank", "world", "attempt", "pid", "host", "clock", "moment", "wall")
        args = {name: about[name] for name in names} | {"run": about.get("run", "")}  # older versions name no run
        if not all(isinstance(args[name], int) for name in ("rank", "world", "attempt", "pid")):
            raise TypeError("a number of a process is no integer")
        if not all(abs(args[name]) <= MOST_SECONDS for name in ("moment", "wall")):
            raise ValueError("an invalid time")
        if not all(isinstance(args[name], str) for name in ("host", "clock", "run")):
            raise TypeError("a name is no text")
    except (ValueError, KeyError, TypeError):
        raise GossamerError(
            f"{path} is not a span file, or was truncated in its first line. Delete it to trace the others"
        ) from None
    whole = len(packed) // RECORD.size
    records = np.frombuffer(packed, dtype=np.dtype(FIELDS), count=whole)
    begin, end = records["begin"], records["end"]
    sound = (np.abs(begin) <= MOST_SECONDS) & (end >= begin) & (end <= MOST_SECONDS) & (records["kind"] > 0)
    return ProcessSpans(path=path, records=records[sound], torn_bytes=len(packed) - whole * RECORD.size, **args)


def read_run(folder: Path) -> list[ProcessSpans]:
    """All processes of a run, by rank and start. Raises GossamerError without any."""
    paths = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    if not paths:
        raise GossamerError(NO_TRACE.format(folder=folder, suffix=SUFFIX))
    found = [read_span_file(path) for path in paths if path.stat().st_size]
    if not found:
        raise GossamerError(f"all span files in {folder} are empty: the run ended before training began")
    return sorted(found, key=lambda each: (each.rank, each.attempt, each.wall))


def newest_run(processes: Sequence[ProcessSpans]) -> list[ProcessSpans]:
    """The processes of the newest run, if several runs wrote into one folder.

    Runs differ by their names. Of runs without names, or with the same one, each start of a rank has one file.

    Args:
        processes: as from `read_run`. Those of an elastic run are all kept: a rank may pass to a new process.
    """
    name = max(processes, key=lambda each: each.wall).run
    processes = [each for each in processes if each.run == name]
    if any(each.is_elastic for each in processes):
        return [*processes]
    starts: dict[tuple[int, int], list[ProcessSpans]] = defaultdict(list)
    for each in processes:
        starts[each.rank, each.attempt].append(each)
    followed = (pair for same in starts.values() for pair in pairwise(same))
    earlier = max((before.ended for before, after in followed if before.ended <= after.wall), default=-inf)
    return [each for each in processes if each.wall >= earlier]


def missing_ranks(processes: list[ProcessSpans]) -> list[int]:
    """Ranks without a file here, such as ranks on another machine."""
    there = {each.rank for each in processes}
    return sorted(set(range(max(each.world for each in processes))) - there)


# -- operators ---------------------------------------------------------------------------------------------------------

KINDS = {  # known to HTA and torch's own viewers
    "cpu_op",
    "user_annotation",
    "kernel",
    "gpu_memcpy",
    "gpu_memset",
    "gpu_user_annotation",
    "cuda_runtime",
    "cuda_driver",
}
MOST_CHARACTERS = 2**30  # of a process's file, unpacked
ROUNDING_SECONDS = 50e-9  # rounding error of torch's times, by which an inner slice may outlast its outer one


class Operator(NamedTuple):
    """Times are seconds of the process's clock."""

    name: str
    category: str
    begin: float
    end: float


def read_operators(spans: Path) -> dict[str, list[Operator]]:
    """Operators by thread or stream, ordered by begin; empty if this process was not profiled.

    Raises GossamerError if the file is truncated, or not written by torch.profiler in a traced run.
    """
    path = spans.with_suffix(OPERATORS_SUFFIX)
    if not path.exists():
        return {}
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            text = file.read(MOST_CHARACTERS + 1)
        if len(text) > MOST_CHARACTERS:
            raise ValueError("it is too large")
        events = [each for each in json.loads(text)["traceEvents"] if each.get("ph") == "X"]
        marks = [each for each in events if each["name"].startswith(CLOCK_MARK)]
        shown = [(float(each["ts"]), float(each["name"].removeprefix(CLOCK_MARK))) for each in marks]
        # A mark begins after reading the clock, later by the time that its thread waits for a core
        return _by_thread(events, *min(shown, key=lambda mark: mark[0] - 1e6 * mark[1]))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GossamerError(
            f"{path} is truncated, or was not written by a traced run ({type(error).__name__}). Delete it to see the "
            "spans without these operators"
        ) from None


def _by_thread(events: Iterable[Mapping[str, Any]], at: float, shown: float) -> dict[str, list[Operator]]:
    found: dict[str, list[Operator]] = defaultdict(list)
    for each in events:
        if each.get("cat") in KINDS and not each["name"].startswith(CLOCK_MARK):
            begin = shown + 1e-6 * (each["ts"] - at)
            operator = Operator(each["name"], each["cat"], begin, begin + 1e-6 * each["dur"])
            found[f"torch {each['pid']}/{each['tid']}"].append(operator)
    return {thread: _nested(operators) for thread, operators in found.items()}


def _nested(operators: Iterable[Operator]) -> list[Operator]:
    """Clip ends that exceed the outer slice's by rounding only."""
    open_: list[float] = []
    made = []
    for each in sorted(operators, key=lambda one: (one.begin, -one.end)):
        while open_ and open_[-1] <= each.begin:
            open_.pop()
        if open_ and open_[-1] < each.end <= open_[-1] + ROUNDING_SECONDS:
            each = each._replace(end=open_[-1])
        open_.append(each.end)
        made.append(each)
    return made
