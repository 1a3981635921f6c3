from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gossamer.events import Attached, Closed, CollectivePicked, Event, Logged, Noticed, Saved, Skipped, StepEnded
from gossamer.observe.event_log import Recorder, live_path
from gossamer.observe.rank_record import RankRecord
from gossamer.observe.record import read_ranks


def attached(moment: float = 100.0) -> Attached:
    return Attached(
        moment=moment, recipe="Dense()", layouts=(), parameters=3, buffer_bytes=0, control_bytes=0, rank=0, world=1
    )


def ended(step: int, moment: float, seconds: float = 1.0, skipped: bool = False) -> StepEnded:
    return StepEnded(
        moment=moment,
        step=step,
        seconds=seconds,
        waiting_seconds=seconds / 4,
        encode_seconds=0.1,
        wire_seconds=0.2,
        decode_seconds=0.3,
        bytes_sent=8.0,
        skipped=skipped,
    )


def closed(moment: float, steps: int) -> Closed:
    return Closed(
        moment=moment,
        steps=steps,
        digest="d",
        residual_bytes=12,
        bucket_bytes=24,
        tensors={"w": "5e"},
        changed_frozen=["w"],
        agrees=True,
        differing={"name": "w"},
    )


def record(directory: Path, *events: Event) -> RankRecord:
    recorder = Recorder(directory, 0)
    for event in events:
        recorder(event)
    recorder.close()
    (written,) = read_ranks(directory)
    return written


def live(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in live_path(directory, 0).read_text().splitlines()]


def test_times_leave_out_the_warm_up_and_bytes_do_not(tmp_path: Path) -> None:
    slow, steady = [ended(step, 100.0 + step, 50.0) for step in range(1, 11)], range(11, 61)
    written = record(
        tmp_path, attached(), *slow, *(ended(step, 100.0 + step, 2.0) for step in steady), closed(170.0, 60)
    )
    assert (written.median_seconds, written.p90_seconds) == (2.0, 2.0)
    assert (written.compute_seconds, written.waiting_seconds) == (1.5, 0.5)
    assert written.wire_seconds == pytest.approx(0.2)
    assert (written.steps, written.seconds, written.bytes_sent) == (60, 70.0, 8.0)
    assert (written.residual_bytes, written.bucket_bytes, written.digest) == (12, 24, "d")
    assert written.holds_merged
    assert (written.tensors, written.agrees, written.differing) == ({"w": "5e"}, True, {"name": "w"})
    assert written.changed_frozen == ["w"]
    assert written.peak_resident_bytes > 1e6


def test_metrics_carry_seconds_since_attach(tmp_path: Path) -> None:
    written = record(tmp_path, attached(), Logged(moment=103.5, step=2, values={"loss": 0.5}))
    assert written.metrics == {"loss": [(2, 3.5, 0.5)]}
    assert written.digest is written.holds_merged is None


def test_skipped_steps_and_checkpoints_are_counted(tmp_path: Path) -> None:
    written = record(
        tmp_path,
        attached(),
        ended(0, 101.0, skipped=True),
        Skipped(moment=101.0, step=0, rank=1, tensor="w"),
        Saved(moment=102.0, step=0, directory="there"),
    )
    assert (written.skipped_steps, written.checkpoints) == (1, [(0, "there")])
    assert [line["kind"] for line in live(tmp_path)] == ["attached", "step", "skipped", "saved"]


def test_live_steps_are_at_most_ten_a_second_and_notices_never_wait(tmp_path: Path) -> None:
    steps = [ended(step, 100.0 + step / 100) for step in range(1, 101)]
    notices = [Noticed(moment=100.5, message=str(number)) for number in range(5)]
    record(tmp_path, attached(), *steps, *notices)
    kinds = [line["kind"] for line in live(tmp_path)]
    assert kinds.count("noticed") == 5
    assert 9 <= kinds.count("step") <= 11


def test_only_who_is_told_to_tells_of_steps(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0, steps_live=False)
    for event in (attached(), ended(1, 101.0), Noticed(message="x")):
        recorder(event)
    recorder.close()
    assert [line["kind"] for line in live(tmp_path)] == ["attached", "noticed"]


def test_a_second_session_begins_afresh(tmp_path: Path) -> None:
    written = record(tmp_path, attached(), ended(1, 101.0), attached(200.0), ended(1, 203.0), closed(204.0, 1))
    assert (written.seconds, written.steps) == (4.0, 1)


def test_without_a_session_there_is_no_record(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0)
    recorder(Logged(step=1, values={"loss": 1.0}))
    recorder(ended(1, 1.0))
    recorder.close()
    assert read_ranks(tmp_path) == []


def test_a_rank_that_came_back_too_late_remains_lost(tmp_path: Path) -> None:
    """A session that raised Stopped as it began was neither closed nor made a step."""
    late = Recorder(tmp_path, 1)
    late(attached())
    late.close()
    assert record(tmp_path, attached(), ended(1, 101.0), closed(102.0, 1)).lost == (1,)


def test_losses_that_are_no_numbers_are_shown_as_such(tmp_path: Path) -> None:
    record(tmp_path, attached(), Logged(moment=100.0, step=1, values={"loss": float("nan")}), ended(1, 101.0))
    assert live(tmp_path)[-1]["metrics"] == {"loss": "nan"}


def test_a_size_that_went_several_ways_says_all_of_them(tmp_path: Path) -> None:
    picked = [CollectivePicked(nbytes=8, collective=name) for name in ("Ring(order=None)", "Direct()", "Direct()")]
    written = record(tmp_path, attached(), *picked, CollectivePicked(nbytes=9, collective="Tree()"), closed(101.0, 0))
    assert written.collectives == {"8": "Ring(order=None), Direct()", "9": "Tree()"}
