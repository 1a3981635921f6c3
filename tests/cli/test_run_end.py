"""What a run says at its end where no session took part in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.base.run_files import RunFiles
from gossamer.cli import run_training as run_end
from gossamer.events import Event, Joined, WithoutSession
from gossamer.launch.job import Job
from gossamer.launch.startup import StageMarks
from gossamer.observe import record as records


class Terminal:
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.parametrize(
    ("heard", "told"),
    [
        ([Joined()], "never called gossamer.attach"),
        ([Joined(), WithoutSession(trains=True)], "ran without a session"),
        ([Joined(), WithoutSession(trains=False)], "ran without a session"),
    ],
)
def test_a_script_that_needs_no_session_is_not_told_to_attach(heard: list[Event], told: str, tmp_path: Path) -> None:
    files, terminal = RunFiles(tmp_path), Terminal()
    for rank in range(2):
        files.report_start(rank, 0, 4711)
    for event in heard:
        StageMarks(files, 1, 0)(event)
    job = Job(script=Path("split.py"), workers=2, logs=tmp_path / "logs")
    run_end.report(job, tmp_path, records.NO_NETWORK, "finished", terminal, None, None)  # type: ignore[arg-type]
    (said,) = terminal.said
    assert told in said
    assert ("Add this line" in said) == (len(heard) == 1)
