"""Chrome JSON: writes a timeline as trace events, for chrome://tracing, Perfetto and readers of torch's traces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isfinite
from typing import Any

from gossamer.observe.trace.timeline import IN_FLIGHT, Timeline

MICRO = 1e6
CATEGORIES = {"steps": "user_annotation", "training": "user_annotation"}  # as in torch's own traces
NANOSECOND = 0.001  # in microseconds, the format's unit: an arrow must arrive before the end of its slice


def pack(timeline: Timeline) -> bytes:
    clocks = {
        identity: {
            "offset_seconds": clock.offset,
            "drift": clock.drift,
            "error_seconds": clock.error if isfinite(clock.error) else None,
            "operations": clock.bounds,
        }
        for identity, clock in timeline.clocks.items()
    }
    text = {
        "traceEvents": list(_events(timeline)),
        "displayTimeUnit": "ms",
        "otherData": {"began": timeline.began, "clocks": clocks},
    }
    return json.dumps(text, allow_nan=False).encode()


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for pid, process in enumerate(timeline.processes, 1):  # viewers use 0 for the idle process
        yield _metadata("process_name", pid, 0, name=process.name)
        yield _metadata("process_labels", pid, 0, labels=process.label)
        yield _metadata("process_sort_index", pid, 0, sort_index=pid)
        for tid, track in enumerate(process.tracks, 1):
            yield _metadata("thread_name", pid, tid, name=track.name)
            yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
            where: dict[str, Any] = {"pid": pid, "tid": tid}
            category = CATEGORIES.get(track.name, "gossamer")
            for each in track.slices:
                begin, end = _micro(each.begin), _micro(each.end)
                name = each.name.replace("step ", "ProfilerStep#") if track.name == "steps" else each.name
                lasts = {"ts": begin, "dur": round(end - begin, 3)}
                yield {"ph": "X", "name": name, "cat": each.category or category, "args": each.about, **where, **lasts}
                for flow in each.sends:
                    yield {"ph": "s", "name": "message", "cat": "gossamer", "id": flow, "ts": begin, **where}
                for flow in each.receives:
                    came = max(begin, round(end - NANOSECOND, 3))
                    yield {"ph": "f", "bp": "e", "name": "message", "cat": "gossamer", "id": flow, "ts": came, **where}
        for moment, value in process.in_flight:
            at = {"ts": _micro(moment), "pid": pid, "tid": 0}
            yield {"ph": "C", "name": IN_FLIGHT, "cat": "gossamer", "args": {"bytes": value}, **at}


def _micro(seconds: float) -> float:
    return round(MICRO * seconds, 3)


def _metadata(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}
