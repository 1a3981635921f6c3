from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gossamer.base.spans import active
from gossamer.base.spans.record_format import OPERATORS_SUFFIX, SpanKind
from gossamer.base.spans.step_range import StepRange
from gossamer.observe.trace.span_files import read_run
from gossamer.observe.trace.timeline import Timeline, build
from gossamer.train.session import step_spans
from gossamer.train.session.step_spans import PROFILED, OperatorProfile, profile_as_told, read_ranks

NEAR_SECONDS = 200e-6  # what the mark may be off by


@pytest.fixture(autouse=True)
def off_again() -> Iterator[None]:
    yield
    active.end()


def train(steps: int) -> None:
    recorder = active.recorder
    assert recorder is not None
    for step in range(1, steps + 1):
        if recorder.follow is not None:
            recorder.follow(recorder.recording)
        began = time.perf_counter()
        wide = torch.ones(1024, 1024)
        wide[:64, :64].mm(wide[:64, :64])
        wide.exp()  # so that no product lies at the edge of its step, where the mark is not exact enough
        recorder.add(SpanKind.FORWARD, began, ended := time.perf_counter())
        recorder.step_ended(step, began, ended)


def profiled(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: StepRange, count: int = 6) -> None:
    monkeypatch.setenv(PROFILED, "0,2")
    profile_as_told(active.begin(folder, 0, 3, steps))
    train(count)
    active.end()


def check_operators(timeline: Timeline, steps: int) -> None:
    """Each of the matrix products lies in a span of its own step."""
    (process,) = timeline.processes
    forward = next(track for track in process.tracks if track.name == "training").slices
    operators = next(track for track in process.tracks if track.name == "operators").slices
    products = [each for each in operators if each.name == "aten::mm"]
    assert len(forward) == len(products) == steps
    for span, product in zip(forward, products, strict=True):
        assert product.category == "cpu_op"
        assert span.begin - NEAR_SECONDS <= product.begin <= product.end <= span.end + NEAR_SECONDS


def test_operators_lie_within_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiled(tmp_path, monkeypatch, StepRange(2, 4))
    check_operators(build(read_run(tmp_path)), 3)
    check_operators(build(read_run(tmp_path), StepRange(3, 3)), 1)


def test_a_clock_that_is_off_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = SimpleNamespace(perf_counter=lambda: time.perf_counter() + 5.0)
    monkeypatch.setattr(step_spans, "time", ahead)
    profiled(tmp_path, monkeypatch, StepRange(2, 4))
    with pytest.raises(AssertionError):
        check_operators(build(read_run(tmp_path)), 3)


def test_ranks_that_were_not_chosen_are_not_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROFILED, "1")
    recorder = active.begin(tmp_path, 0, 3)
    profile_as_told(recorder)
    assert recorder.follow is None


def test_so_many_steps_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_spans, "MOST_PASSES", 2)
    profiled(tmp_path, monkeypatch, StepRange(1, 6))
    assert "no more are profiled" in caplog.text
    timeline = build(read_run(tmp_path))
    products = [each for each in timeline.slices() if each.name == "aten::mm"]
    assert len(products) == 2


def test_a_profiler_that_fails_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: OperatorProfile) -> None:
        raise RuntimeError("there is one already")

    monkeypatch.setattr(OperatorProfile, "_begin", refuse)
    with caplog.at_level(logging.WARNING):
        profiled(tmp_path, monkeypatch, StepRange(1, 6))
    assert [record.getMessage().count("there is one already") for record in caplog.records] == [1]
    assert not list(tmp_path.glob(f"*{OPERATORS_SUFFIX}"))


def test_ranks_are_numbers_with_commas() -> None:
    assert read_ranks("0,12") == {0, 12}
    assert read_ranks("all") is None
    for text in ("", "0,", "-1", "0;1", "first"):
        with pytest.raises(ValueError, match="such as 0,2"):
            read_ranks(text)
