"""Reads a trace back with Perfetto's own classes, and checks what holds in every one."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest

BEGIN, END, COUNTER = 1, 2, 4  # TrackEvent.Type


@dataclass
class ReadSlice:
    """Nanoseconds."""

    track: int
    name: str
    begin: int
    end: int = -1


@dataclass
class ReadTrace:
    """As Perfetto understands it. flows: (track, moment) of both ends."""

    processes: dict[int, str] = field(default_factory=dict)
    tracks: dict[int, tuple[int, str]] = field(default_factory=dict)  # parent and name
    slices: list[ReadSlice] = field(default_factory=list)
    leave: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    come: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    counters: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def of(self, each: ReadSlice) -> str:
        return self.processes[self.tracks[each.track][0]]


def read_back(content: bytes) -> ReadTrace:
    """Raises AssertionError where beginnings and ends do not fit each other."""
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="the perfetto package")
    trace, told = protos.Trace(), ReadTrace()
    trace.ParseFromString(content)
    open_: dict[int, list[ReadSlice]] = defaultdict(list)
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            about = packet.track_descriptor
            if about.HasField("process"):
                told.processes[about.uuid] = about.process.process_name
            else:
                told.tracks[about.uuid] = about.parent_uuid, about.name
            continue
        event, moment = packet.track_event, packet.timestamp
        track = event.track_uuid
        assert track in told.tracks, "an event comes after its track was named"
        if event.type == BEGIN:
            open_[track].append(ReadSlice(track, event.name, moment))
            told.slices.append(open_[track][-1])
        elif event.type == END:
            open_[track].pop().end = moment
        elif event.type == COUNTER:
            told.counters[track].append((moment, event.counter_value))
        for flow in event.flow_ids:
            told.leave[flow].append((track, moment))
        for flow in event.terminating_flow_ids:
            told.come[flow].append((track, moment))
    assert not any(open_.values())
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
