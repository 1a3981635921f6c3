"""Reads a trace back from its JSON, and checks what holds in every trace."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass
class ReadSlice:
    """Nanoseconds."""

    track: int
    name: str
    begin: int
    end: int = -1


@dataclass
class ReadTrace:
    """leave, come: (track, moment) of both ends of each arrow."""

    processes: dict[int, str] = field(default_factory=dict)
    tracks: dict[int, tuple[int, str]] = field(default_factory=dict)  # parent and name
    slices: list[ReadSlice] = field(default_factory=list)
    leave: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    come: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    counters: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def of(self, each: ReadSlice) -> str:
        return self.processes[self.tracks[each.track][0]]


def read_back(content: bytes) -> ReadTrace:
    """Read trace-event JSON. Raises AssertionError for an event on a track that was not named before."""
    told = ReadTrace()
    tracks: dict[tuple[int, int | str], int] = {}  # by process and thread, or by process and counter

    def track(pid: int, key: int | str, name: str) -> int:
        number = tracks.setdefault((pid, key), len(tracks))
        told.tracks.setdefault(number, (pid, name))
        return number

    for event in json.loads(content)["traceEvents"]:
        pid, tid, moment = event["pid"], event["tid"], round(1000 * event["ts"])
        match event["ph"]:
            case "M":
                if event["name"] == "process_name":
                    told.processes[pid] = event["args"]["name"]
                elif event["name"] == "thread_name":
                    track(pid, tid, event["args"]["name"])
            case "X":
                end = moment + round(1000 * event["dur"])
                told.slices.append(ReadSlice(tracks[pid, tid], event["name"], moment, end))
            case "s":
                told.leave[event["id"]].append((tracks[pid, tid], moment))
            case "f":
                told.come[event["id"]].append((tracks[pid, tid], moment))
            case "C":
                told.counters[track(pid, event["name"], event["name"])].append((moment, event["args"]["bytes"]))
            case unknown:
                raise AssertionError(unknown)
    return told


def check_read_back(told: ReadTrace) -> None:
    """Tracks have names and a process; slices nest; arrows are pairs, and nothing comes before it was sent; counters
    come back to nothing."""
    assert told.slices
    for parent, name in told.tracks.values():
        assert name
        assert told.processes[parent]
    assert max(Counter(told.tracks.values()).values()) == 1
    for track in told.tracks:
        ends: list[int] = []
        for each in (one for one in told.slices if one.track == track):
            assert each.name
            assert each.begin <= each.end
            while ends and ends[-1] <= each.begin:
                ends.pop()
            assert not ends or each.end <= ends[-1]
            ends.append(each.end)
    assert told.leave.keys() == told.come.keys() != set()
    for flow, sent in told.leave.items():
        ((_, left),), ((_, came),) = sent, told.come[flow]
        assert left <= came
    for values in told.counters.values():
        assert values[-1][1] == 0
        assert [moment for moment, _ in values] == sorted(moment for moment, _ in values)
