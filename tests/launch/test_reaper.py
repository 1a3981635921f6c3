from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer.launch import reaper as reaper_module
from gossamer.launch.logs.run_files import RunFiles, write_json
from gossamer.launch.reaper import Reaper

STUBBORN = "import signal, sys; signal.signal(15, signal.SIG_IGN); print(1, flush=True); sys.stdin.read()"

pytestmark = pytest.mark.processes


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def stubborn() -> Iterator[subprocess.Popen[bytes]]:
    """A worker that ignores the request to end."""
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN], start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path)


def watching(files: RunFiles, workers: int = 1) -> tuple[Reaper, Clock]:
    """A reaper of the first attempt, which gives workers 3 seconds after a failure."""
    clock = Clock()
    reaper = Reaper(files, 3.0, clock)
    reaper.begin(0, range(workers))
    return reaper, clock


def test_nobody_is_killed_while_all_is_well(files: RunFiles, stubborn: subprocess.Popen[bytes]) -> None:
    reaper, clock = watching(files)
    write_json(files.started(0, 0), {"pid": stubborn.pid})
    clock.seconds = 1e9
    reaper.look()
    assert stubborn.poll() is None
    assert not reaper.killed


def test_after_a_failure_the_others_have_a_moment_and_no_more(
    files: RunFiles, stubborn: subprocess.Popen[bytes]
) -> None:
    reaper, clock = watching(files, 2)
    write_json(files.started(0, 0), {"pid": stubborn.pid})
    write_json(files.failure(1, 0), {"rank": 1})
    reaper.look()  # rank 1 never said its pid: nothing to conclude from
    write_json(files.started(1, 0), {"pid": stubborn.pid})
    reaper.look()
    clock.seconds = 2.9
    reaper.look()
    assert stubborn.poll() is None
    clock.seconds = 3.1
    reaper.look()
    assert stubborn.wait(5) == -signal.SIGKILL
    assert 0 in reaper.killed


def ended(files: RunFiles, code: str) -> Reaper:
    """A reaper that has watched a worker which runs `code` to its end."""
    reaper, _ = watching(files)
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        write_json(files.started(0, 0), {"pid": process.pid})
        reaper.look()
        if reaper_module.await_end is reaper_module._look_at_end:
            reaper._watchers[0].join(10)  # sees the end before this test collects the worker
        exit_code = process.wait()
    assert exit_code in (0, reaper.died.get(0, (exit_code, 0))[0])  # still there for whoever started it
    reaper._watchers[0].join(10)
    assert 0 in reaper._ended
    return reaper


def test_a_killed_worker_counts_as_a_failure_and_keeps_its_exit_code(files: RunFiles) -> None:
    reaper = ended(files, "import os; os.kill(os.getpid(), 9)")
    assert reaper.died[0][0] == -signal.SIGKILL
    assert reaper._deadline == 3.0


def test_who_died_first_was_prompted_by_nobody(files: RunFiles) -> None:
    assert ended(files, "import os; os.kill(os.getpid(), 15)").unprompted == {0}


def test_who_dies_after_a_request_or_another_was_prompted(files: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper_module, "await_end", lambda pid: -15)
    reaper, _ = watching(files, 2)
    reaper.died[1] = (1, 0.0)
    reaper._watch(0, 0, 0)
    assert not reaper.unprompted
    reaper.begin(0, range(2))
    reaper.request_stop()
    reaper._watch(0, 0, 0)
    assert not reaper.unprompted


@pytest.mark.parametrize("code", ["", "import os; os._exit(0)"])
def test_a_worker_that_ended_well_is_no_failure(files: RunFiles, code: str) -> None:
    reaper = ended(files, code)
    assert not reaper.died
    assert reaper._deadline is None


@pytest.mark.parametrize(("op", "deadline"), [(True, None), (False, 3.0)])
def test_a_system_that_cannot_look_without_collecting_goes_by_the_workers_last_word(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch, op: bool, deadline: float | None
) -> None:
    monkeypatch.setattr(reaper_module, "await_end", reaper_module._await_collection)
    if op:
        write_json(files.finished(0, 0), {"moment": 0.0})
    reaper = ended(files, "import os; os.kill(os.getpid(), 9)")
    assert not reaper.died
    assert reaper._deadline == deadline


def test_a_new_attempt_forgives(files: RunFiles, stubborn: subprocess.Popen[bytes]) -> None:
    reaper, clock = watching(files)
    reaper.stop()
    reaper.begin(1, range(1))
    write_json(files.started(0, 1), {"pid": stubborn.pid})
    clock.seconds = 10.0
    reaper.look()
    assert stubborn.poll() is None
