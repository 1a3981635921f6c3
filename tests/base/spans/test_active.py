from __future__ import annotations

import os
from pathlib import Path

import pytest

from gossamer.base.spans import active
from gossamer.base.spans.record_format import SpanKind
from gossamer.observe.trace.span_files import read_run


@pytest.fixture(autouse=True)
def off_again() -> object:
    yield
    active.end()


def test_nothing_is_recorded_unless_the_environment_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(active.TRACE, raising=False)
    active.begin_from_environment(0, 1)
    assert active.recorder is None
    monkeypatch.setenv(active.TRACE, str(tmp_path))
    monkeypatch.setenv(active.STEPS, "3:4")
    active.begin_from_environment(0, 1)
    recorder = active.recorder
    assert recorder is not None
    active.begin_from_environment(0, 1)  # another session
    assert active.recorder is recorder
    assert not recorder.recording
    recorder.step_ended(2, 0.0, 1.0)
    assert recorder.recording


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    recorder = active.begin(tmp_path, 0, 1)
    recorder.add(SpanKind.FORWARD, 1.0, 2.0)
    child = os.fork()
    if not child:
        os._exit(0 if active.recorder is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    active.end()
    (only,) = read_run(tmp_path)
    assert len(only.of(SpanKind.FORWARD)) == 1
