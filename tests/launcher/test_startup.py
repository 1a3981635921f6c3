"""What is said of workers before their first step."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.base.run_files import RunFiles, Stage, read_json
from gossamer.events import Attached, Joined, LeftRun, Logged, ResidualMeasured, WithoutSession
from gossamer.launcher.job import Job
from gossamer.launcher.startup import StageMarks, Startup

ATTACHED = Attached(recipe="Dense()", layouts=(), parameters=1, buffer_bytes=0, control_bytes=0, rank=0, world=2)


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path)


def test_each_line_says_who_is_where(files: RunFiles) -> None:
    now = [100.0]
    job = Job(script=Path("somewhere/train.py"), workers=2, nodes=2, node_rank=1, rendezvous="a:1", logs=Path("logs"))
    startup = Startup(job, files, lambda: now[0])

    def after(seconds: float) -> str:
        now[0] = 100.0 + seconds
        return str(startup)

    assert after(0) == "waiting for the other machines · 0 s"
    files.report_start(3, 0, 4711)
    assert after(1) == "starting 2 workers · 0 of 2 imported torch · 1 s"
    files.report_start(2, 0, 4711)
    files.mark(Stage.ENTERED, 3, 0)
    assert after(4) == "starting 2 workers · 1 of 2 imported torch · 4 s"
    files.mark(Stage.ENTERED, 2, 0)
    assert after(5) == "starting 2 workers · train.py runs, 0 of 2 joined (gossamer.init) · 5 s"
    for rank in (2, 3):
        StageMarks(files, rank, 0)(Joined())
    StageMarks(files, 2, 0)(Logged(step=1, values={}))
    assert after(6) == "starting 2 workers · all joined, 0 of 2 attached (gossamer.attach) · 6 s"
    StageMarks(files, 2, 0)(ATTACHED)
    assert after(7) == "starting 2 workers · all joined, 1 of 2 attached (gossamer.attach) · 7 s"
    StageMarks(files, 3, 0)(ATTACHED)
    assert after(9) == "2 workers attached, before the first step · 9 s"


def test_workers_that_need_no_session_are_not_told_to_attach(files: RunFiles) -> None:
    startup = Startup(Job(script=Path("train.py"), workers=1, logs=Path("logs")), files, lambda: 0.0)
    files.report_start(0, 0, 4711)
    files.mark(Stage.ENTERED, 0, 0)
    marks = StageMarks(files, 0, 0)
    marks(Joined())
    marks(WithoutSession(trains=False))
    assert str(startup) == "starting 1 worker · all joined, 0 of 1 attached (gossamer.attach) · 0 s"
    marks(WithoutSession(trains=True))
    assert str(startup) == "1 worker joined, without a session (gossamer.attach) so far · 0 s"
    marks(ATTACHED)
    assert str(startup) == "1 worker attached, before the first step · 0 s"


def test_a_worker_that_is_started_again_begins_again(files: RunFiles) -> None:
    startup = Startup(Job(script=Path("train.py"), workers=1, logs=Path("logs")), files, lambda: 0.0)
    for attempt in range(11):
        files.report_start(0, attempt, 4711)
        assert str(startup) == "starting 1 worker · 0 of 1 imported torch · 0 s"
        files.mark(Stage.ENTERED, 0, attempt)
        assert "train.py runs" in str(startup)


def test_a_full_disk_ends_no_training(files: RunFiles) -> None:
    StageMarks(RunFiles(files.directory / "none"), 1, 0)(ResidualMeasured(step=3, norm=0.5))
    StageMarks(files, 1, 0)(ResidualMeasured(step=3, norm=0.5))
    for event in (Joined(), ATTACHED, WithoutSession(trains=True)):
        StageMarks(RunFiles(files.directory / "none"), 1, 0)(event)
    assert read_json(files.residual(1, 0)) == {"norm": 0.5, "step": 3}


def test_a_worker_that_leaves_an_elastic_run_is_marked(files: RunFiles) -> None:
    files.report_start(1, 0, 4711)
    assert not files.has_reached(Stage.LEFT, 1)
    StageMarks(files, 1, 0)(LeftRun())
    assert files.has_reached(Stage.LEFT, 1)
    files.report_start(1, 1, 4712)
    assert (files.has_reached(Stage.LEFT, 1), files.has_ever_reached(Stage.LEFT, 1)) == (False, True)
    assert not files.has_ever_reached(Stage.LEFT, 11)
