from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.perfetto_readers import check_read_back, read_back
from support.virtual_traces import CLOCKS, JOINED, LAST, LEFT, Rounds, record_changes

from gossamer.observe.trace.perfetto import _field, _varint, pack
from gossamer.observe.trace.span_files import read_run
from gossamer.observe.trace.timeline import Timeline, build

NEAR_NANOSECONDS = 50_000_000


def recorded(folder: Path) -> Timeline:
    Rounds(count=20).record(folder, CLOCKS)
    return build(read_run(folder))


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of a message of protobuf."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        tag = varint()
        match tag & 7:
            case 0:
                yield tag >> 3, varint()
            case 1:
                at += 8
                yield tag >> 3, message[at - 8 : at]
            case 2:
                length = varint()
                at += length
                yield tag >> 3, message[at - length : at]


def test_numbers_are_packed_as_protobuf_says() -> None:
    assert _varint(0) == b"\x00"
    assert _varint(300) == b"\xac\x02"
    assert _varint(-1) == b"\xff" * 9 + b"\x01"
    assert _field(1, 150) == b"\x08\x96\x01"
    assert _field(2, "testing") == b"\x12\x07testing"


def check_slices(content: bytes, timeline: Timeline) -> None:
    """On every track beginnings and ends are in order of time and fit each other, and arrows are pairs."""
    open_: Counter[Any] = Counter()
    last: dict[Any, int] = {}
    flows: dict[int, list[bytes]] = {47: [], 48: []}
    begun = 0
    for number, packet in fields(content):
        assert number == 1
        assert isinstance(packet, bytes)
        told = dict(fields(packet))
        if 11 not in told:
            continue
        event = list(fields(told[11]))
        about = dict(event)
        track = about[11]
        assert told[8] >= last.get(track, 0)
        last[track] = told[8]
        begun += about[9] == 1
        open_[track] += {1: 1, 2: -1}.get(about[9], 0)
        assert open_[track] >= 0
        for tag, found in flows.items():
            found += [value for number, value in event if number == tag]
    assert set(open_.values()) <= {0}
    assert begun == sum(1 for _ in timeline.slices())
    assert sorted(flows[47]) == sorted(flows[48])
    assert len(set(flows[47])) == len(flows[47]) == timeline.arrows > 0


def test_slices_and_arrows_fit(tmp_path: Path) -> None:
    timeline = recorded(tmp_path)
    check_slices(pack(timeline), timeline)


def test_an_arrow_without_its_end_is_seen(tmp_path: Path) -> None:
    timeline = recorded(tmp_path)
    next(each for each in timeline.slices() if each.receives).receives.clear()
    with pytest.raises(AssertionError):
        check_slices(pack(timeline), timeline)


def test_googles_classes_read_it(tmp_path: Path) -> None:
    protos = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="the perfetto package")
    timeline = recorded(tmp_path)
    trace = protos.Trace()
    trace.ParseFromString(pack(timeline))
    names = [packet.track_descriptor.process.process_name for packet in trace.packet]
    assert [name for name in names if name] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    begun = [packet.track_event.name for packet in trace.packet if packet.track_event.type == 1]
    assert Counter(begun) == Counter(each.name for each in timeline.slices())
    leave = [flow for packet in trace.packet for flow in packet.track_event.flow_ids]
    come = [flow for packet in trace.packet for flow in packet.track_event.terminating_flow_ids]
    assert sorted(leave) == sorted(come) == list(range(1, timeline.arrows + 1))
    counters = [packet.track_event.counter_value for packet in trace.packet if packet.track_event.type == 4]
    assert set(counters) == {0, 40}


def test_nothing_comes_before_it_was_sent_in_perfettos_own_reading(tmp_path: Path) -> None:
    """Of clocks that are hours apart and drift."""
    check_read_back(read_back(pack(recorded(tmp_path))))


def test_arrows_that_come_before_they_leave_would_be_seen(tmp_path: Path) -> None:
    """One rank a second late: what it sends comes to others before it does."""
    timeline = recorded(tmp_path)
    for each in (one for track in timeline.processes[1].tracks for one in track.slices):
        each.begin, each.end = each.begin + 1.0, each.end + 1.0
    with pytest.raises(AssertionError):
        check_read_back(read_back(pack(timeline)))


def test_slices_that_overlap_in_part_would_be_seen(tmp_path: Path) -> None:
    """What is written is closed in order, so that the one that began first would end too late."""
    timeline = recorded(tmp_path)
    first, second = timeline.processes[0].tracks[0].slices[:2]
    first.end = (second.begin + second.end) / 2
    with pytest.raises(AssertionError):
        check_read_back(read_back(pack(timeline)))


def check_changes(folder: Path) -> None:
    """One arrow for each round of two, and none between a rank that left and one that joined."""
    told = read_back(pack(build(read_run(folder))))
    check_read_back(told)
    assert list(told.processes.values()) == ["rank 0", "rank 1", "rank 1 (2)"]
    steps = [each for each in told.slices if told.tracks[each.track][1] == "steps"]
    stayed, left, joined = (
        {each.name: each.end for each in steps if told.of(each) == name} for name in told.processes.values()
    )
    for ends in (left, joined):  # of the same steps at the same time
        assert all(abs(end - stayed[name]) < NEAR_NANOSECONDS for name, end in ends.items())
    assert left.keys() == {f"step {number}" for number in range(1, LEFT)}  # its last record is torn
    assert joined.keys() == {f"step {number}" for number in range(JOINED, LAST + 1)}
    assert len(told.leave) == LEFT + (LAST - JOINED + 1)


def test_a_rank_that_left_and_one_that_joined_are_two(tmp_path: Path) -> None:
    """Both are rank 1, on clocks of their own, and the first one's file is torn."""
    record_changes(tmp_path, CLOCKS[:3])
    check_changes(tmp_path)


def test_operations_that_are_counted_from_ones_own_beginning_would_be_seen(tmp_path: Path) -> None:
    """The newcomer's first operation is not the run's first."""
    record_changes(tmp_path, CLOCKS[:3], numbered=False)
    with pytest.raises(AssertionError):
        check_changes(tmp_path)
