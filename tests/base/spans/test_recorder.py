from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.virtual_traces import FakeGroup, RelayedGroup

from gossamer.base.spans import recorder as span_recorder
from gossamer.base.spans.record_format import EVERYONE, NO_RANK, SpanKind
from gossamer.base.spans.recorder import MANY, SpanRecorder, clock_identity, mask
from gossamer.base.spans.step_range import StepRange
from gossamer.observe.trace.span_files import ProcessSpans, read_run


def recorder(folder: Path, steps: StepRange | None = None) -> SpanRecorder:
    return SpanRecorder(folder, 1, 4, steps or StepRange())


def read(folder: Path) -> ProcessSpans:
    (only,) = read_run(folder)
    return only


def test_threads_write_whole_records_next_to_each_other(tmp_path: Path) -> None:
    count, recording = 50 * MANY + 7, recorder(tmp_path)

    def work(number: int) -> None:
        for moment in range(count):
            recording.add(SpanKind.ENCODE, float(moment), moment + 0.5, number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        recording.write()  # meanwhile, as the writer does
    recording.close()
    spans = read(tmp_path).of(SpanKind.ENCODE)
    for number in range(3):
        assert list(spans[spans["number"] == number]["begin"]) == [float(moment) for moment in range(count)]


def test_what_a_killed_process_loses_is_a_second_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was recorded is written without any other call, also where nothing more is: as while a step hangs."""
    assert span_recorder.WRITE_SECONDS <= 1.0
    monkeypatch.setattr(span_recorder, "WRITE_SECONDS", 0.01)
    recording = recorder(tmp_path)
    recording.add(SpanKind.FORWARD, 1.0, 2.0)
    until = time.monotonic() + 30
    while not len(read(tmp_path).of(SpanKind.FORWARD)):
        assert time.monotonic() < until
    recording.close()


def test_a_disk_that_stalls_stops_no_thread_and_ends_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What waits in memory has a bound; and neither a step nor the end waits for the disk."""
    stalled, goes_on = threading.Event(), threading.Event()

    def stall(file: int, content: bytes) -> int:
        stalled.set()
        assert goes_on.wait(60)
        return len(content)

    monkeypatch.setattr(span_recorder, "WRITE_SECONDS", 0.01)
    monkeypatch.setattr(span_recorder, "CLOSE_SECONDS", 0.01)
    monkeypatch.setattr(span_recorder, "MOST_WAITING", 100)
    recording = recorder(tmp_path)
    monkeypatch.setattr(span_recorder.os, "write", stall)
    recording.add(SpanKind.FORWARD, 1.0, 2.0)
    assert stalled.wait(60)
    for moment in range(101):
        assert recording.recording
        recording.add(SpanKind.FORWARD, float(moment), moment + 0.5)
    recording.step_ended(1, 0.0, 1.0)
    assert not recording.recording
    recording.close()
    goes_on.set()
    monkeypatch.setattr(span_recorder, "CLOSE_SECONDS", 60)
    recording.close()
    assert [record.getMessage().count("faster than the disk") for record in caplog.records] == [1]


def test_only_the_steps_that_were_asked_for_are_recorded(tmp_path: Path) -> None:
    recording = recorder(tmp_path, StepRange(3, 4))
    for step in range(1, 7):
        recording.add(SpanKind.FORWARD, float(step), step + 0.5, step)
        recording.step_ended(step, float(step), step + 1.0)
    recording.close()
    assert list(read(tmp_path).of(SpanKind.FORWARD)["number"]) == [3, 4]
    assert list(read(tmp_path).of(SpanKind.STEP)["number"]) == [3, 4]


def test_operations_are_counted_also_where_they_are_not_recorded(tmp_path: Path) -> None:
    """Or ranks would number them differently that begin to record at different times."""
    recording, whole, site = recorder(tmp_path, StepRange(2, 2)), FakeGroup(1, 4), FakeGroup(1, 2)
    for _ in range(3):
        recording.operation(1.0, 2.0, recording.position(whole), 1, 8, EVERYONE)
    recording.step_ended(1, 0.0, 2.0)
    recording.operation(3.0, 4.0, recording.position(whole), 1, 8, EVERYONE)
    recording.operation(3.0, 4.0, recording.position(site), 1, 8, mask([1], 2))
    recording.close()
    spans = read(tmp_path)
    assert set(spans.operations) == {(0, 0, 0, 4, 3), (0, 1, 0, 2, 0)}


def test_a_group_may_number_its_operations_itself(tmp_path: Path) -> None:
    class Numbered(FakeGroup):
        operation_number = 77

    recording, group = recorder(tmp_path), Numbered(0, 2)
    recording.operation(1.0, 2.0, recording.position(group), 1, 8, EVERYONE)
    recording.close()
    assert list(read(tmp_path).operations) == [(-1, -1, 0, 0, 77)]


def test_backward_is_one_span_from_what_began_it_first(tmp_path: Path) -> None:
    recording = recorder(tmp_path)
    recording.backward_ended()  # none began
    recording.backward_begins()
    began = recording.backward_began
    recording.backward_begins()
    recording.backward_ended()
    recording.backward_ended()
    recording.close()
    assert list(read(tmp_path).of(SpanKind.BACKWARD)["begin"]) == [began]


@pytest.mark.parametrize("torn", [True, False])
def test_a_full_disk_ends_the_trace_and_not_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, torn: bool
) -> None:
    recording, write = recorder(tmp_path), os.write

    def full(file: int, content: bytes) -> int:
        if torn:
            return write(file, content[:30])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(span_recorder.os, "write", full)
    with caplog.at_level(logging.WARNING):
        for moment in range(12 * MANY):
            recording.add(SpanKind.FORWARD, float(moment), moment + 0.5)
        recording.write()
        recording.step_ended(1, 0.0, 1.0)
    assert not recording.recording
    recording.close()
    assert len(caplog.records) == 1
    assert "ends here" in caplog.text
    assert len(read(tmp_path).records) == 0
    assert read(tmp_path).torn_bytes == 30 * torn


def test_a_file_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_recorder, "MOST_BYTES", 2**20)
    recording = recorder(tmp_path)
    for moment in range(300 * MANY):
        recording.add(SpanKind.FORWARD, moment / 1e6, moment / 1e6)
    recording.close()
    assert recording.path.stat().st_size < 2**21


def test_masks_name_ranks() -> None:
    assert mask([0, 2], 4) == 0b101
    assert mask(range(4), 4) == EVERYONE
    assert mask([1, 70], 100) == 0b10


def test_processes_of_this_machine_share_a_clock_where_that_is_known() -> None:
    script = "from gossamer.base.spans.recorder import clock_identity; print(clock_identity())"
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    assert clock_identity() == clock_identity()
    assert (other == clock_identity()) == clock_identity().startswith("boot-")


def test_relays_are_recorded_as_they_change(tmp_path: Path) -> None:
    recording, group = recorder(tmp_path), RelayedGroup(1, 4)
    views: list[dict[int, int | None]] = [{}, {2: 0, 3: 0}, {2: 0, 3: None, 99: 0}, {}, {}]
    for group.detours in views:
        for _ in range(3):
            recording.position(group)
    recording.close()
    records = read(tmp_path).of(SpanKind.RELAYED)
    assert [(each["number"], each["peers"]) for each in records] == [(0, 12), (NO_RANK, 8), (0, 4), (NO_RANK, 0)]


def test_a_group_without_relays_has_no_record_of_them(tmp_path: Path) -> None:
    recording = recorder(tmp_path)
    for group in (FakeGroup(1, 4), RelayedGroup(1, 4)):
        recording.position(group)
    recording.close()
    assert not len(read(tmp_path).of(SpanKind.RELAYED))
