"""Dumps of stacks: whom a launcher may signal, and when it does."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer.base.run_files import RunFiles
from gossamer.events import Stalled, StepEnded
from gossamer.launcher import stack_dumps
from gossamer.launcher.signal_forwarding import SignalForwarder
from gossamer.launcher.stack_dumps import END, HEAD, SIGNAL, DumpOnSignal, StackRequests, ask

STALLED = Stalled(rank=0, seconds=60.0, waits_for=(1,))


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    (tmp_path / ".run").mkdir()
    return RunFiles(tmp_path / ".run")


@pytest.fixture
def worker(files: RunFiles) -> Iterator[DumpOnSignal]:
    """This process, as rank 3."""
    before = signal.getsignal(SIGNAL)
    made = DumpOnSignal(files, 3)
    yield made
    made.close()
    signal.signal(SIGNAL, before)


def test_a_worker_that_is_asked_writes_where_it_is_into_its_file_and_its_log(
    files: RunFiles, worker: DumpOnSignal, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert ask(files.all_stacks()) == [os.getpid()]
    text = files.stacks(3).read_text()
    assert "test_a_worker_that_is_asked_writes_where_it_is" in text or "in ask" in text
    assert text.count("Current thread") == 1  # the newest alone
    head, *_, end = capfd.readouterr().err.splitlines()
    assert (head, end) == (HEAD.format(rank=3), END.format(rank=3))


def test_a_worker_that_has_ended_is_not_signaled(
    files: RunFiles, worker: DumpOnSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be another process's by now. Broken twin: asking whoever's file is there."""
    (files.directory / f"stacks-1-{os.getppid()}.txt").touch()
    sent: list[int] = []
    monkeypatch.setattr(stack_dumps.os, "kill", lambda pid, number: sent.append(pid))
    assert ask(files.all_stacks()) == [os.getpid()] == sent
    worker.close()
    assert ask(files.all_stacks()) == []
    assert not files.stacks(3).exists()  # nothing was ever in it


def test_a_script_that_takes_the_signal_for_itself_keeps_it(files: RunFiles, worker: DumpOnSignal) -> None:
    heard: list[int] = []
    signal.signal(SIGNAL, lambda number, frame: heard.append(number))
    worker(StepEnded(step=1, seconds=0.1))
    assert ask(files.all_stacks()) == []
    os.kill(os.getpid(), SIGNAL)
    assert heard == [SIGNAL]
    worker.close()
    assert signal.getsignal(SIGNAL) != signal.SIG_IGN


def test_a_stall_ends_no_training_if_the_folder_of_the_run_was_removed(files: RunFiles, worker: DumpOnSignal) -> None:
    shutil.rmtree(files.directory)
    worker(STALLED)


class Launcher:
    """With a worker that lives and takes the signal, counted, and a clock."""

    def __init__(self, files: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.asked, self.said = 0.0, 0, list[str]()
        monkeypatch.setattr(stack_dumps, "ask", self._ask)
        self.requests = StackRequests(files, files.directory.parent, self.said.append, lambda: self.now)

    def _ask(self, dumps: list[Path]) -> list[int]:
        self.asked += 1
        return [1]


def test_a_healthy_run_is_never_asked(files: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(files, monkeypatch)
    for _ in range(1000):
        launcher.now += 1.0
        launcher.requests.tick()
    assert (launcher.asked, launcher.said) == (0, [])


def test_all_are_asked_once_a_silence(files: RunFiles, worker: DumpOnSignal, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(files, monkeypatch)
    worker(STALLED)
    for _ in range(1000):
        launcher.now += 1.0
        launcher.requests.tick()
    assert launcher.asked == 1
    files.stalled(2).touch()  # another that waits, in the next silence
    launcher.requests.tick()
    assert launcher.asked == 2
    launcher.now += 1.0
    files.stalled(0).touch()  # the same silence, told by another
    launcher.requests.tick()
    assert launcher.asked == 2
    assert len(launcher.said) == 2
    assert "gossamer stacks" in launcher.said[0]


def test_the_launcher_hands_the_signal_on(files: RunFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(files, monkeypatch)
    forwarder = SignalForwarder(files, launcher.requests, launcher.said.append)
    forwarder(SIGNAL)
    assert launcher.asked == 0  # not within the handler
    forwarder.tick()
    forwarder.tick()
    assert launcher.asked == 1


def test_what_was_dumped_stays_next_to_the_logs(files: RunFiles, worker: DumpOnSignal) -> None:
    requests = StackRequests(files, files.directory.parent, print)
    requests.keep()
    assert not list(files.directory.parent.glob("stacks-*"))
    ask(files.all_stacks())
    requests.keep()
    (kept,) = files.directory.parent.glob("stacks-3-*.txt")
    assert "Current thread" in kept.read_text()


def test_a_full_disk_at_the_end_of_a_run_loses_only_the_copies_of_dumps(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        (files.directory / f"stacks-{rank}-{os.getpid()}.txt").write_text("Current thread")
    copy = shutil.copyfile

    def fill(source: Path, target: Path) -> None:
        if "stacks-0" in target.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", fill)
    StackRequests(files, files.directory.parent, print).keep()
    assert [path.name for path in files.directory.parent.glob("stacks-*")] == [f"stacks-1-{os.getpid()}.txt"]


def test_the_lock_goes_with_the_process_that_holds_it(files: RunFiles, worker: DumpOnSignal) -> None:
    with files.stacks(3).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
