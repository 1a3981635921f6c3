"""The parent watchdog: no process outlives a killed launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import SOON_SECONDS, all_end_soon, eventually, watched
from support.served_launches import Run

from gossamer.launcher import parent_watchdog
from gossamer.launcher.failure import Outcome
from gossamer.launcher.parent_watchdog import OrphanReaper, left

pytestmark = pytest.mark.processes
LAUNCHER = """
import subprocess, sys
sys.path.insert(0, sys.argv[2])  # without the rest of the package, which takes seconds
from pathlib import Path
from parent_watchdog import OrphanReaper
with OrphanReaper(Path(sys.argv[3])) as guard:
    child = subprocess.Popen([sys.executable, "-S", "-c", sys.argv[1]], start_new_session=True)
    {}
    print(child.pid, flush=True)
    sys.stdin.read()
"""
HELPER = "import os; print(os.getpid(), flush=True); os.kill(os.getpid(), 19)"
LAUNCH_FOLDER = str(Path(parent_watchdog.__file__).parent)
STANDING = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {HELPER!r}])"


def check_nothing_outlives_a_killed_launcher(registration: str, seconds: float) -> None:
    """A process and its helper, which stands still."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", LAUNCHER.format(registration), STANDING, LAUNCH_FOLDER, "none"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        opened = [os.pidfd_open(pid) for pid in pids]
        launcher.kill()
        ended = all_end_soon(opened, seconds)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert ended


@watched
def test_nothing_outlives_a_killed_launcher() -> None:
    check_nothing_outlives_a_killed_launcher("guard.add(child.pid)", SOON_SECONDS)


@watched
def test_the_check_of_who_outlives_notices_them() -> None:
    with pytest.raises(AssertionError):
        check_nothing_outlives_a_killed_launcher("guard.add(child.pid); guard.remove(child.pid)", 0.1)


def test_the_guard_leaves_alone_what_ended_before() -> None:
    assert left(["+3\n", "+4\n", "-3\n", "-5\n", "+6\n"]) == ({4, 6}, "")


def test_a_directory_is_removed_where_nobody_took_that_back() -> None:
    assert left(['="a\\nb"\n', "+3\n"]) == ({3}, "a\nb")
    assert left(['="a"\n', '=""\n']) == (set(), "")


def end_of_launcher(directory: Path, *, killed: bool) -> None:
    """A launcher with this directory, which was killed or came to its end; and its guard."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", LAUNCHER.format(""), "", LAUNCH_FOLDER, str(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        assert launcher.stdin is not None
        assert launcher.stdout is not None
        launcher.stdout.readline()
        if killed:
            launcher.kill()
        launcher.stdin.close()


def test_a_killed_launcher_leaves_no_secret_behind(tmp_path: Path) -> None:
    run, kept = tmp_path / "run", tmp_path / "kept"
    for directory in (run, kept):
        (directory / "journal-0").mkdir(parents=True)
        (directory / "token").write_text("secret")
    end_of_launcher(run, killed=True)
    assert eventually(lambda: not run.exists())
    end_of_launcher(kept, killed=False)
    assert (kept / "token").exists()


def test_of_a_killed_launcher_s_directory_only_event_logs_that_hold_something_stay(tmp_path: Path) -> None:
    (tmp_path / "journal-0").mkdir()
    for name in ("token", "live-0.jsonl", "journal-0/log", "events-0.jsonl"):
        (tmp_path / name).write_text("")
    (tmp_path / "events-1.jsonl").write_text("{}\n")
    assert not parent_watchdog.remove(tmp_path)
    assert parent_watchdog.remove(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["events-1.jsonl"]


def test_a_run_continues_without_its_guard(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    enter = OrphanReaper.__enter__

    def killed(self: OrphanReaper) -> OrphanReaper:
        enter(self)._process.kill()
        self._process.wait()
        return self

    monkeypatch.setattr(OrphanReaper, "__enter__", killed)
    assert run("print(ask(0)[0])", workers=1) == Outcome()


def test_an_end_that_is_told_after_the_block_is_no_error(tmp_path: Path) -> None:
    """By a worker's watcher, which runs in a thread of its own."""
    with OrphanReaper(tmp_path) as reaper:
        pass
    reaper.remove(1)
