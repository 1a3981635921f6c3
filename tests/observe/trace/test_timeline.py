from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from support.virtual_traces import CLOCKS, GATHER, RelayedGroup, Rounds

from gossamer.base.spans.record_format import EVERYONE
from gossamer.base.spans.recorder import SpanRecorder
from gossamer.base.spans.step_range import StepRange
from gossamer.errors import GossamerError
from gossamer.observe.trace import timeline as timelines
from gossamer.observe.trace.clock_alignment import AlignedClock, align
from gossamer.observe.trace.span_files import read_run
from gossamer.observe.trace.timeline import Slice, Timeline, _lanes, build


def check_arrows(timeline: Timeline, operations: int, ranks: int) -> None:
    """Each leaves once and comes once, and none comes before it left: one for everybody who waited for another."""
    left = {flow: each for each in timeline.slices() for flow in each.sends}
    came = {flow: each for each in timeline.slices() for flow in each.receives}
    assert left.keys() == came.keys() == set(range(operations * (ranks - 1)))
    assert all(left[flow].begin <= came[flow].end for flow in left)
    assert Counter(flow for each in timeline.slices() for flow in each.sends).most_common(1)[0][1] == 1


def test_nothing_comes_before_it_was_sent(tmp_path: Path) -> None:
    Rounds(count=20).record(tmp_path, CLOCKS)
    check_arrows(build(read_run(tmp_path)), 20, 4)


def test_clocks_as_they_are_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Rounds(count=20).record(tmp_path, CLOCKS)
    monkeypatch.setattr(timelines, "align", lambda processes: {each.clock: AlignedClock() for each in processes})
    with pytest.raises(AssertionError):
        check_arrows(build(read_run(tmp_path)), 20, 4)


def test_a_contradiction_draws_no_arrow_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Rounds(count=20).record(tmp_path, CLOCKS[:2])
    real = align(read_run(tmp_path))
    off = {name: replace(clock, offset=clock.offset + 5.0 * bool(clock.bounds)) for name, clock in real.items()}
    monkeypatch.setattr(timelines, "align", lambda processes: off)
    timeline = build(read_run(tmp_path))
    left = {flow: each for each in timeline.slices() for flow in each.sends}
    assert all(left[flow].begin <= each.end for each in timeline.slices() for flow in each.receives)


def test_steps_are_chosen_by_each_process(tmp_path: Path) -> None:
    Rounds(count=20).record(tmp_path, CLOCKS)
    timeline = build(read_run(tmp_path), StepRange(5, 7))
    for process in timeline.processes:
        steps, *_ = process.tracks
        assert [each.name for each in steps.slices] == ["step 5", "step 6", "step 7"]
    assert min(each.begin for each in timeline.slices()) == 0.0
    check_arrows(timeline, 3, 4)


def test_steps_that_were_not_recorded_are_refused_with_those_that_were(tmp_path: Path) -> None:
    Rounds(count=20).record(tmp_path, CLOCKS[:2])
    with pytest.raises(GossamerError, match=r"the trace has 1 to 20\. Write --steps 1:20"):
        build(read_run(tmp_path), StepRange(21, 30))


def test_a_missing_rank_leaves_the_others(tmp_path: Path) -> None:
    Rounds(count=20).record(tmp_path, CLOCKS)
    next(tmp_path.glob("trace-0-*")).unlink()
    timeline = build(read_run(tmp_path))
    assert [each.name for each in timeline.processes] == ["rank 1", "rank 2", "rank 3"]
    check_arrows(timeline, 20, 3)


def test_bytes_in_flight_come_back_to_nothing(tmp_path: Path) -> None:
    Rounds(count=20).record(tmp_path, CLOCKS[:2])
    for process in build(read_run(tmp_path)).processes:
        values = [value for _, value in process.in_flight]
        assert values == [40, 0] * 20
        assert all(early <= late for (early, _), (late, _) in pairwise(process.in_flight))


def lanes(slices: list[tuple[float, float]], *, nests: bool) -> list[list[tuple[float, float]]]:
    found = _lanes("wire", [Slice("", begin, end) for begin, end in slices], nests=nests)
    return [[(each.begin, each.end) for each in lane] for _, lane in found]


def test_slices_that_overlap_in_part_have_lanes_of_their_own() -> None:
    assert lanes([(0, 2), (1, 3), (2, 4)], nests=False) == [[(0, 2), (2, 4)], [(1, 3)]]
    assert lanes([(0, 4), (1, 3), (2, 5)], nests=True) == [[(0, 4), (1, 3)], [(2, 5)]]
    assert lanes([(0, 4), (1, 3)], nests=False) == [[(0, 4)], [(1, 3)]]
    assert lanes([(0, 4), (1, 3), (3, 4), (4, 5)], nests=True) == [[(0, 4), (1, 3), (3, 4), (4, 5)]]


def test_operations_show_the_relays_of_their_time(tmp_path: Path) -> None:
    recorder, group = SpanRecorder(tmp_path, 1, 4, StepRange()), RelayedGroup(1, 4)
    for group.detours in ({}, {2: 0, 3: None}, {2: 0}, {}):
        for _ in range(2):
            began = time.perf_counter()
            place = recorder.position(group)
            recorder.operation(began, time.perf_counter(), place, GATHER, 40, EVERYONE)
    recorder.close()
    (process,) = build(read_run(tmp_path)).processes
    (wire,) = [track for track in process.tracks if track.name == "wire"]
    both = "to places 3 through a relay; to places 2 through place 0"
    relays = [each.about.get("relayed links") for each in wire.slices]
    assert relays == [None] * 2 + [both] * 2 + ["to places 2 through place 0"] * 2 + [None] * 2
