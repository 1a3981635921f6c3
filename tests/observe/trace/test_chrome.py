from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.trace_reader import check_read_back, read_back
from support.virtual_traces import CLOCKS, JOINED, LAST, LEFT, Rounds, record_changes

from gossamer.observe.trace.chrome import pack
from gossamer.observe.trace.span_files import read_run
from gossamer.observe.trace.timeline import Timeline, build

NEAR_NANOSECONDS = 50_000_000


def recorded(folder: Path) -> Timeline:
    Rounds(count=20).record(folder, CLOCKS)
    return build(read_run(folder))


def written(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(pack(recorded(folder)))
    return content


def test_torch_finds_it_valid(tmp_path: Path) -> None:
    validator = pytest.importorskip("torch.profiler._trace_validator", reason="torch's validator of traces")
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(written(tmp_path)))
    assert validator.validate_trace(str(path)) == (True, [])


def check_events(events: list[dict[str, Any]]) -> None:
    """Every arrow has one beginning and one end, in this order, each within a slice of its track."""
    ends = {kind: {each["id"]: each for each in events if each["ph"] == kind} for kind in "sf"}
    assert ends["s"].keys() == ends["f"].keys() != set()
    assert Counter(each["ph"] for each in events)["s"] == len(ends["s"])
    for flow, sent in ends["s"].items():
        assert sent["ts"] <= ends["f"][flow]["ts"]
    for each in (*ends["s"].values(), *ends["f"].values()):
        assert any(
            one["ph"] == "X"
            and (one["pid"], one["tid"]) == (each["pid"], each["tid"])
            and one["ts"] <= each["ts"] < one["ts"] + one["dur"]
            for one in events
        )


def test_arrows_are_pairs_within_slices(tmp_path: Path) -> None:
    check_events(written(tmp_path)["traceEvents"])


def test_an_arrow_without_its_end_is_seen(tmp_path: Path) -> None:
    events = written(tmp_path)["traceEvents"]
    events.remove(next(each for each in events if each["ph"] == "f"))
    with pytest.raises(AssertionError):
        check_events(events)


def test_steps_are_named_as_torch_names_them(tmp_path: Path) -> None:
    content = written(tmp_path)
    steps = {each["name"] for each in content["traceEvents"] if each.get("cat") == "user_annotation"}
    assert {"ProfilerStep#1", "ProfilerStep#20", "forward"} <= steps
    told = content["otherData"]["clocks"]
    assert told["machine 0"]["error_seconds"] == 0
    assert 0 < told["machine 1"]["error_seconds"] < 0.02


def test_all_slices_arrows_and_counters_are_written(tmp_path: Path) -> None:
    timeline = recorded(tmp_path)
    told = read_back(pack(timeline))
    assert list(told.processes.values()) == ["rank 0", "rank 1", "rank 2", "rank 3"]
    names = Counter(each.name.replace("step ", "ProfilerStep#") for each in timeline.slices())
    assert Counter(each.name for each in told.slices) == names
    assert sorted(told.leave) == sorted(told.come) == list(range(timeline.arrows))
    assert {value for values in told.counters.values() for _, value in values} == {0, 40}


def test_no_process_has_the_number_of_the_idle_process(tmp_path: Path) -> None:
    """Viewers take process 0 for the idle process of the machine."""
    assert 0 not in read_back(pack(recorded(tmp_path))).processes


def test_each_process_tells_its_host_and_its_clock_error(tmp_path: Path) -> None:
    labels = [each["args"]["labels"] for each in written(tmp_path)["traceEvents"] if each["name"] == "process_labels"]
    assert len(labels) == 4
    assert all("clock" in label for label in labels)


def test_nothing_comes_before_it_was_sent(tmp_path: Path) -> None:
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
    assert left.keys() == {f"ProfilerStep#{number}" for number in range(1, LEFT)}  # its last record is torn
    assert joined.keys() == {f"ProfilerStep#{number}" for number in range(JOINED, LAST + 1)}
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
