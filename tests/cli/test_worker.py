"""One worker of `gossamer run`, and whether it tells of its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossamer import events
from gossamer.cli import worker
from gossamer.observe.event_log import Recorder


@pytest.mark.parametrize(("rank", "run", "tells"), [("0", "", True), ("1", "", False), ("1", "1", True)])
def test_where_the_first_may_be_lost_all_tell_of_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, run: str, tells: bool
) -> None:
    """A run that outlives losses keeps a registry of its workers."""
    begun: list[dict[str, Any]] = []

    def record(directory: Path, number: int, **options: Any) -> Recorder:
        begun.append(options)
        return Recorder(directory, number)

    here = {"GOSSAMER_RUN_DIRECTORY": str(tmp_path), "RANK": rank, "LOCAL_RANK": rank, "GOSSAMER_REGISTRY": run}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(worker, "Recorder", record)
    monkeypatch.setattr(worker.worker, "main", lambda finish: finish(False))
    monkeypatch.setattr(events, "subscribe", lambda listener, **options: lambda: None)
    worker.main()
    assert [each["steps_live"] for each in begun] == [tells]
