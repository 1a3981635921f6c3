from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from gossamer.base.spans import active
from gossamer.base.spans.record_format import SpanKind
from gossamer.errors import AttachError
from gossamer.observe.trace.span_files import ProcessSpans, read_run
from gossamer.train.session.step_spans import StepHook, begin_tracing, hooks
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


def test_what_comes_after_a_step_is_not_in_it(tmp_path: Path) -> None:
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
