"""Forwarding of SIGUSR1 and SIGUSR2: which processes receive a signal of the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gossamer.base.run_files import RunFiles, write_json
from gossamer.launcher import signal_forwarding
from gossamer.launcher.signal_forwarding import FORWARDED, SignalForwarder, forward
from gossamer.launcher.stack_dumps import StackRequests

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# Prints what it received, until its input ends
WORKER = """
import signal, sys
def heard(number, frame):
    print(signal.Signals(number).name, flush=True)
for word in sys.argv[1:]:
    name, way = word.split("=")
    signal.signal(getattr(signal, name), heard if way == "handled" else signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
"""


class Workers:
    """Processes with handlers, by rank, and a launcher's forwarder to them."""

    def __init__(self, folder: Path) -> None:
        self.files, self.notes = RunFiles(folder), list[str]()
        self.processes: list[subprocess.Popen[str]] = []
        stacks = StackRequests(self.files, folder, self.notes.append)
        self.forwarder = SignalForwarder(self.files, stacks, self.notes.append)

    def start(self, *handlers: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-S", "-c", WORKER, *handlers]
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        self.files.report_start(len(self.processes), 0, process.pid)
        self.processes.append(process)
        return process

    def send(self, number: signal.Signals) -> list[str]:
        """The notes on a signal to the launcher."""
        self.notes.clear()
        self.forwarder(number)
        self.forwarder.tick()
        return list(self.notes)


def received(process: subprocess.Popen[str]) -> list[str]:
    """The signals that the process had handled when it ended; it ends by itself."""
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return said.split()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path)
    yield made
    for process in made.processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", FORWARDED)
def test_a_signal_reaches_the_workers_that_handle_it_and_ends_no_other(
    workers: Workers, number: signal.Signals
) -> None:
    handled, default, ignored = (
        workers.start(*words) for words in ([f"{number.name}=handled"], [], [f"{number.name}=ignored"])
    )
    assert workers.send(number) == [f"{number.name} was forwarded to rank 0"]
    assert [received(process) for process in (handled, default, ignored)] == [[number.name], [], []]


def test_a_signal_that_no_worker_handles_is_noted(workers: Workers) -> None:
    workers.start("SIGUSR1=handled")
    assert workers.send(signal.SIGUSR2) == ["SIGUSR2 was ignored: no worker handles it"]
    assert received(workers.processes[0]) == []


def test_several_workers_are_named(workers: Workers) -> None:
    for _ in range(2):
        workers.start("SIGUSR2=handled")
    assert workers.send(signal.SIGUSR2) == ["SIGUSR2 was forwarded to ranks 0, 1"]


def test_a_process_id_that_belongs_to_another_process_is_left_alone(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of a worker that has ended, or a process that is not the launcher's child."""
    sent: list[int] = []
    monkeypatch.setattr(signal_forwarding.os, "kill", lambda pid, number: sent.append(pid))
    ended, other = workers.start("SIGUSR2=handled"), workers.start("SIGUSR2=handled")
    write_json(workers.files.exited(0, 0), {})
    workers.files.report_start(2, 0, os.getpid())  # handles it, and is no child of itself
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert forward(signal.SIGUSR2, workers.files) == [1]
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert sent == [other.pid] != [ended.pid]


def test_sigusr1_is_sent_once_to_a_worker_that_writes_its_stacks(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps, own = workers.start("SIGUSR1=handled"), workers.start("SIGUSR1=handled")
    monkeypatch.setattr("gossamer.launcher.stack_dumps.ask", lambda paths: [dumps.pid])
    stacks, sent = workers.send(signal.SIGUSR1)
    assert "wrote the Python stacks of its workers" in stacks
    assert sent == "SIGUSR1 was forwarded to rank 1"
    assert [received(process) for process in (dumps, own)] == [[], ["SIGUSR1"]]
