from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.virtual_traces import CLOCKS, Rounds, SkewedClock, record_changes

from gossamer.base.spans.record_format import CLOCK_MARK, OPERATORS_SUFFIX, RECORD, SpanKind
from gossamer.errors import GossamerError
from gossamer.observe.trace.span_files import (
    Operator,
    missing_ranks,
    newest_run,
    read_operators,
    read_run,
    read_span_file,
)


def test_what_was_recorded_is_read(tmp_path: Path) -> None:
    Rounds(count=5).record(tmp_path, CLOCKS[:2])
    first, second = read_run(tmp_path)
    assert (first.rank, second.rank, first.world, first.torn_bytes) == (0, 1, 2, 0)
    assert list(first.of(SpanKind.STEP)["number"]) == [1, 2, 3, 4, 5]
    assert first.operations.keys() == second.operations.keys()
    assert len(first.operations) == 5


@pytest.mark.parametrize("cut", range(1, RECORD.size + 1, 7))
def test_a_torn_end_costs_the_last_record(tmp_path: Path, cut: int) -> None:
    Rounds(count=5).record(tmp_path, CLOCKS[:1])
    (path,) = tmp_path.glob("*.spans")
    whole = len(read_span_file(path).records)
    path.write_bytes(path.read_bytes()[:-cut])
    torn = read_span_file(path)
    assert len(torn.records) == whole - 1
    assert torn.torn_bytes == (RECORD.size - cut) % RECORD.size


def test_records_that_make_no_sense_are_left_out(tmp_path: Path) -> None:
    Rounds(count=5).record(tmp_path, CLOCKS[:1])
    (path,) = tmp_path.glob("*.spans")
    whole = len(read_span_file(path).records)
    nan = RECORD.pack(float("nan"), 1.0, 1, 0, 0, 0, 0, 0)
    backwards = RECORD.pack(2.0, 1.0, 1, 0, 0, 0, 0, 0)
    endless = RECORD.pack(1.0, float("inf"), 1, 0, 0, 0, 0, 0)
    path.write_bytes(path.read_bytes() + nan + backwards + endless + bytes(RECORD.size))
    assert len(read_span_file(path).records) == whole


def test_an_operation_that_was_made_again_holds_from_its_first_beginning_to_its_last_end(tmp_path: Path) -> None:
    Rounds(count=1).record(tmp_path, CLOCKS[:1])
    (path,) = tmp_path.glob("*.spans")
    ((key, (began, ended, _)),) = read_span_file(path).operations.items()
    again = RECORD.pack(began + 1, ended + 1, SpanKind.OPERATION, 0, 2, 0, 40, -1)
    path.write_bytes(path.read_bytes() + again)
    assert read_span_file(path).operations == {key: (began, ended + 1, -1)}


def test_a_folder_without_a_trace_names_the_line_to_write(tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match="gossamer run --trace all"):
        read_run(tmp_path)
    (tmp_path / "trace-0-1.spans").touch()
    with pytest.raises(GossamerError, match="empty"):
        read_run(tmp_path)


@pytest.mark.parametrize("content", [b"\x00\x01", b"{}\n", b'{"format": "gossamer spans"', b"[1]\n", b"3\n"])
def test_an_invalid_file_of_spans_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace-0-1.spans"
    path.write_bytes(content)
    with pytest.raises(GossamerError, match=r"trace-0-1\.spans"):
        read_run(tmp_path)


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace-0-1.spans"
    path.write_text(json.dumps({"format": "gossamer spans", "version": 2}) + "\n")
    with pytest.raises(GossamerError, match="newer"):
        read_run(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("rank", "0"), ("moment", 1e300), ("wall", None), ("host", 3)])
def test_a_first_line_with_a_damaged_field_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    Rounds(count=1).record(tmp_path, CLOCKS[:1])
    (path,) = tmp_path.glob("*.spans")
    line, _, packed = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps({**json.loads(line), name: value}).encode() + b"\n" + packed)
    with pytest.raises(GossamerError, match="not a span file"):
        read_span_file(path)


def test_missing_ranks_are_known(tmp_path: Path) -> None:
    Rounds(count=2).record(tmp_path, CLOCKS)
    next(tmp_path.glob("trace-2-*")).unlink()
    assert missing_ranks(read_run(tmp_path)) == [2]


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", ph: str = "X") -> dict[str, Any]:
    return {"ph": ph, "cat": cat, "name": name, "pid": 7, "tid": 8, "ts": ts, "dur": dur}


def written(folder: Path, *events: dict[str, Any]) -> Path:
    spans = folder / "trace-0-1-abc.spans"
    spans.with_suffix(OPERATORS_SUFFIX).write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return spans


MARK = event(f"{CLOCK_MARK}100.5", 4e12, 3.0, "user_annotation")


def test_the_mark_places_them_on_the_process_clock(tmp_path: Path) -> None:
    far = event("python", 4e12, 9.0, "python_function")
    spans = written(tmp_path, MARK, far, event("aten::mm", 4e12 + 2e6, 1e6), event("x", 4e12, 1.0, ph="i"))
    assert read_operators(spans) == {"torch 7/8": [Operator("aten::mm", "cpu_op", 102.5, 103.5)]}


def test_the_promptest_mark_counts(tmp_path: Path) -> None:
    """A thread that had to wait for a core began its mark late: by it, all operators would lie too early."""
    late = event(f"{CLOCK_MARK}101.5", 4e12 + 1.3e6, 3.0, "user_annotation")
    spans = written(tmp_path, late, MARK, event("aten::mm", 4e12 + 2e6, 1e6))
    assert read_operators(spans) == {"torch 7/8": [Operator("aten::mm", "cpu_op", 102.5, 103.5)]}


def test_an_inner_slice_outlasts_its_outer_one_by_no_rounding(tmp_path: Path) -> None:
    spans = written(tmp_path, MARK, event("outer", 4e12, 10.0), event("inner", 4e12 + 5, 5.001))
    outer, inner = read_operators(spans)["torch 7/8"]
    assert inner.end == outer.end


def test_what_is_none_is_refused_by_name(tmp_path: Path) -> None:
    assert read_operators(tmp_path / "trace-1-2-abc.spans") == {}
    spans = written(tmp_path, event("aten::mm", 4e12, 1.0))  # without a mark
    path = spans.with_suffix(OPERATORS_SUFFIX)
    whole = path.read_bytes()
    for content in (whole, whole[:-10], b"", b"text", gzip.compress(b"[]"), gzip.compress(b'{"traceEvents": [3]}')):
        path.write_bytes(content)
        with pytest.raises(GossamerError, match="Delete it"):
            read_operators(spans)


def traced_twice(folder: Path, record: Callable[[list[SkewedClock]], object]) -> tuple[set[Path], set[Path]]:
    """The files of two runs in one folder, at times of this machine."""
    clocks = [SkewedClock(time.perf_counter() - 1000.0 + place) for place in range(3)]
    record(clocks)
    first = {*folder.iterdir()}
    record(clocks)
    return first, {*folder.iterdir()} - first


def test_of_two_runs_in_one_folder_the_newest_is_taken(tmp_path: Path) -> None:
    _, second = traced_twice(tmp_path, lambda clocks: Rounds(count=3).record(tmp_path, clocks))
    assert {each.path for each in newest_run(read_run(tmp_path))} == second


def test_a_rank_whose_file_is_missing_is_not_replaced_by_an_earlier_runs(tmp_path: Path) -> None:
    _, second = traced_twice(tmp_path, lambda clocks: Rounds(count=3).record(tmp_path, clocks))
    lost = next(path for path in second if path.name.startswith("trace-2-"))
    lost.unlink()
    assert {each.path for each in newest_run(read_run(tmp_path))} == second - {lost}


def test_all_members_of_an_elastic_run_are_kept(tmp_path: Path) -> None:
    record_changes(tmp_path, [SkewedClock(time.perf_counter() - 1000.0) for _ in range(3)])
    assert len(newest_run(read_run(tmp_path))) == 3


def test_of_two_elastic_runs_in_one_folder_the_newest_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["first", "second"])

    def record(clocks: list[SkewedClock]) -> None:
        monkeypatch.setenv("GOSSAMER_RUN", next(names))
        record_changes(tmp_path, clocks)

    first, second = traced_twice(tmp_path, record)
    assert len(first) == len(second) == 3
    assert {each.path for each in newest_run(read_run(tmp_path))} == second


def test_files_without_a_name_of_their_run_are_read(tmp_path: Path) -> None:
    Rounds(count=3).record(tmp_path, CLOCKS[:1])
    (path,) = tmp_path.glob("*.spans")
    line, _, records = path.read_bytes().partition(b"\n")
    about = json.loads(line)
    del about["run"]
    path.write_bytes(json.dumps(about).encode() + b"\n" + records)
    assert [each.run for each in newest_run(read_run(tmp_path))] == [""]


def test_a_run_without_another_is_kept_whole(tmp_path: Path) -> None:
    Rounds(count=3).record(tmp_path, CLOCKS)
    assert len(newest_run(read_run(tmp_path))) == len(CLOCKS)


def test_files_of_a_rank_that_overlap_in_time_are_kept(tmp_path: Path) -> None:
    for _ in range(2):
        Rounds(count=3).record(tmp_path, [SkewedClock(time.perf_counter() + 1000.0)] * 2)
    assert len(newest_run(read_run(tmp_path))) == 4
