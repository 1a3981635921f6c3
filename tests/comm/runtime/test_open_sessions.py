"""Registry of open sessions: the launcher's worker closes those that a script left open."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
from torch import nn
from torch.optim import SGD

import gossamer
from gossamer import events
from gossamer.base.run_files import RunFiles
from gossamer.comm.runtime import open_sessions as registry
from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.launcher import worker
from gossamer.train.session.session import Session

SCRIPT = """
import gossamer
from torch import nn
from torch.optim import SGD
model = nn.Linear(3, 2)
session = gossamer.attach(model, SGD(model.parameters(), 0.1))
"""


def attached() -> Session:
    model = nn.Linear(3, 2)
    return gossamer.attach(model, SGD(model.parameters(), 0.1))


def test_a_session_is_there_until_it_is_closed() -> None:
    session = attached()
    assert session in open_sessions()
    session.close()
    assert session not in open_sessions()


def test_a_session_that_is_collected_is_not_there() -> None:
    session = attached()
    own = session.model
    del session
    gc.collect()
    assert all(other.model is not own for other in open_sessions())


def closed_by_the_worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many sessions the worker closes after a script that left its one open."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(registry, "_open", type(registry._open)())  # without those of other tests
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    closed: list[events.Closed] = []
    end = events.subscribe(lambda event: closed.append(event) if isinstance(event, events.Closed) else None)
    try:
        worker._run([str(script)], worker.FailureReporter(RunFiles(folder), 0))
    finally:
        end()
    return len(closed)


def test_the_worker_closes_what_a_script_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert closed_by_the_worker(tmp_path, monkeypatch) == 1


def test_a_registry_that_forgets_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "register", lambda session: None)
    assert closed_by_the_worker(tmp_path, monkeypatch) == 0
    with pytest.raises(AssertionError):
        test_a_session_is_there_until_it_is_closed()
