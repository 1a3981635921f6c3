from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gossamer.base.spans import active
from gossamer.base.spans.record_format import OPERATORS_SUFFIX, SpanKind
from gossamer.base.spans.step_range import StepRange
from gossamer.errors import AttachError
from gossamer.observe.trace.span_files import ProcessSpans, read_run
from gossamer.observe.trace.timeline import Timeline, build
from gossamer.train.session import step_spans
from gossamer.train.session.step_spans import (
    PROFILED,
    OperatorProfile,
    StepHook,
    begin_tracing,
    hooks,
    profile_from_environment,
    read_ranks,
)
from gossamer.train.world_state import current


@pytest.fixture(autouse=True)
def off_again() -> Iterator[None]:
    yield
    active.end()


def nothing(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None: ...


def made(*, after: StepHook = nothing) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for hook in hooks(model, optimizer, nothing, after):
        assert hook is not None
    return model, optimizer


def read(folder: Path) -> ProcessSpans:
    active.end()
    (only,) = read_run(folder)
    return only


def test_forward_and_step_are_spans_and_backward_begins_at_the_models_output(tmp_path: Path) -> None:
    recorder = active.begin(tmp_path, 0, 1)
    model, optimizer = made()
    loss = model(torch.ones(2, 4)).sum()
    assert recorder.backward_began is None
    loss.backward()
    assert recorder.backward_began is not None
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(2, 4))
    spans = read(tmp_path)
    assert len(spans.of(SpanKind.FORWARD)) == 2
    assert len(spans.of(SpanKind.OPTIMIZER)) == 1
    assert spans.of(SpanKind.FORWARD)["end"][0] <= recorder.backward_began <= spans.of(SpanKind.OPTIMIZER)["begin"][0]


def test_spans_after_a_step_are_outside_of_it(tmp_path: Path) -> None:
    recorder = active.begin(tmp_path, 0, 1)
    model, optimizer = made(after=lambda *_: recorder.add(SpanKind.WAITING, *2 * (torch.tensor(0.0).item(),)))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    kinds = list(read(tmp_path).records["kind"])
    assert kinds.index(SpanKind.OPTIMIZER) < kinds.index(SpanKind.WAITING)


def test_where_nothing_is_recorded_the_model_has_no_hook() -> None:
    model, optimizer = made()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_hooks_of_a_trace_that_is_over_do_nothing(tmp_path: Path) -> None:
    active.begin(tmp_path, 0, 1)
    model, optimizer = made()
    active.end()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def test_a_place_that_cannot_be_written_and_wrong_steps_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(active.TRACE, str(tmp_path / "file"))
    with pytest.raises(AttachError, match="GOSSAMER_TRACE=DIRECTORY"):
        begin_tracing(current())
    monkeypatch.setenv(active.TRACE, str(tmp_path))
    monkeypatch.setenv(active.STEPS, "often")
    with pytest.raises(AttachError, match="100:110"):
        begin_tracing(current())


# -- spans of operators -----------------------------------------------------------------------------------------------

NEAR_SECONDS = 200e-6  # what the mark may be off by


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
    profile_from_environment(active.begin(folder, 0, 3, steps))
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


def test_spans_of_operators_are_within_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    profile_from_environment(recorder)
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
