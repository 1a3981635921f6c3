"""Torch operators: reads what torch.profiler wrote beside a process's spans, on that process's own clock.

torch counts microseconds from a moment of its own choice. The file holds a slice whose name says what the process's
clock showed as it began: the distance to it places all others.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gossamer.base.tracing.record_format import CLOCK_MARK, OPERATORS_SUFFIX
from gossamer.errors import GossamerError

KINDS = {  # what HTA and torch's own viewers know
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
ROUNDING_SECONDS = 50e-9  # of times as torch writes them, by which an inner slice may outlast its outer one


class Operator(NamedTuple):
    """Moments are seconds of the process's clock."""

    name: str
    category: str
    begin: float
    end: float


def read_operators(spans: Path) -> dict[str, list[Operator]]:
    """By thread or stream, in order of their beginnings; nothing where this process was not profiled.

    Raises GossamerError where the file is torn, or none of torch.profiler's of a traced run.
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
        # A mark begins after it has looked at the clock, by as long as its thread has to wait for a core
        return _by_thread(events, *min(shown, key=lambda mark: mark[0] - 1e6 * mark[1]))
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise GossamerError(
            f"{path} is torn, or was not written by a traced run ({type(error).__name__}). Delete it to see the spans "
            "without these operators"
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
    """Without the ends that come after the outer slice's by rounding alone."""
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
