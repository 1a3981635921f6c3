"""Coordinator server and workers as real processes: killed, stopped, interrupted, started again."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.elastic_members import TOKEN
from support.processes import TESTS, environment

from gossamer.comm.elastic.coordinator_server import CoordinatorServer
from gossamer.comm.elastic.remote_control import resize
from gossamer.comm.membership.next_view import CoordinatorOptions
from gossamer.errors import ConnectError

pytestmark = pytest.mark.processes
PATIENCE_SECONDS = 150.0


class Process:
    """A program of tests/support, and the lines that it says."""

    def __init__(self, program: str, *arguments: object) -> None:
        path = TESTS / "support" / program
        self.popen = subprocess.Popen(
            [sys.executable, str(path), *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(0, 1, 0),
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.lines.put(line.strip())

    def line(self, beginning: str) -> str:
        """The next line that begins so; others are dropped."""
        while not (line := self.lines.get(timeout=PATIENCE_SECONDS)).startswith(beginning):
            pass
        return line

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._reader.join()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts programs of tests/support, which do not outlive the test."""
    processes: list[Process] = []

    def start_one(program: str, *arguments: object) -> Process:
        processes.append(Process(program, *arguments))
        return processes[-1]

    yield start_one
    for each in processes:
        each.end()


def run_of(start: Start, tmp_path: Path, workers: int, dead_after_seconds: float) -> tuple[Process, list[Process], str]:
    """A coordinator, its workers by place in view 1, and where it listens."""
    coordinator = start("elastic_coordinator.py", tmp_path / "journal", workers, dead_after_seconds, 0)
    where = coordinator.line("address").split()[1]
    members = [start("elastic_worker.py", where, place, dead_after_seconds) for place in range(workers)]
    for each in members:
        assert each.line("view").split()[1:3] == ["1", str(workers)]
    return coordinator, members, where


def test_a_killed_worker_is_out_long_before_its_silence_would_count(start: Start, tmp_path: Path) -> None:
    """Its closed connection is evidence: 0.15 s here, where it says nothing for 10 s."""
    _, members, where = run_of(start, tmp_path, 3, 10.0)
    killed_at = time.time()
    members[1].popen.send_signal(signal.SIGKILL)
    seconds = []
    for each in (members[0], members[2]):
        _, number, world, moment = each.line("view").split()
        assert (number, world) == ("2", "2")
        seconds.append(float(moment) - killed_at)
    print(f"out after {max(seconds):.3f} s")
    assert max(seconds) < 5.0  # on a machine that is busy
    again = start("elastic_worker.py", where, 1, 10.0)
    for each in (members[0], members[2], again):
        assert each.line("view").split()[1:3] == ["3", "3"]


def test_promise_4_a_stopped_worker_is_out_and_hears_so_when_it_continues(start: Start, tmp_path: Path) -> None:
    _, members, _ = run_of(start, tmp_path, 2, 3.0)
    stopped_at = time.time()
    members[1].popen.send_signal(signal.SIGSTOP)
    _, number, world, moment = members[0].line("view").split()
    assert (number, world) == ("2", "1")
    assert 2.4 < float(moment) - stopped_at < 30.0
    members[1].popen.send_signal(signal.SIGCONT)
    assert "no longer in the run" in members[1].line("out")


def test_a_coordinator_that_was_stopped_or_killed_costs_nobody_its_place(start: Start, tmp_path: Path) -> None:
    coordinator, members, where = run_of(start, tmp_path, 3, 2.0)
    coordinator.popen.send_signal(signal.SIGSTOP)
    time.sleep(4.5)  # all workers take it for dead, and close their connections
    coordinator.popen.send_signal(signal.SIGCONT)
    with pytest.raises(queue.Empty):
        members[0].lines.get(timeout=1.0)
    coordinator.popen.send_signal(signal.SIGKILL)
    coordinator.popen.wait()
    port = where.partition(":")[2]
    start("elastic_coordinator.py", tmp_path / "journal", 3, 2.0, port).line("address")
    newcomer = start("elastic_worker.py", where, -1, 2.0)
    for each in (*members, newcomer):  # their next view: one without a member would have come before
        assert each.line("view").split()[1:3] == ["2", "4"]


def test_a_worker_that_waits_ends_by_ctrl_c(start: Start, tmp_path: Path) -> None:
    _, members, _ = run_of(start, tmp_path, 1, 1.0)
    asked_at = time.time()
    members[0].popen.send_signal(signal.SIGINT)
    assert float(members[0].line("interrupted").split()[1]) - asked_at < 40.0
    assert members[0].popen.wait(PATIENCE_SECONDS) == 0


def test_promise_14_a_port_that_is_taken_is_named() -> None:
    def serve(port: int) -> CoordinatorServer:
        return CoordinatorServer(
            CoordinatorOptions(least=1, most=1, initial=1),
            token=TOKEN,
            address="127.0.0.1",
            port=port,
            journal=None,
            note=print,
        )

    with serve(0) as server:
        with pytest.raises(ConnectError, match=f"Port {server.address[1]} of 127.0.0.1 is in use"):
            serve(server.address[1])
        port = server.address[1]
    with pytest.raises(ConnectError, match="no coordinator of an elastic run answered"):
        resize(("127.0.0.1", port), TOKEN, 2, seconds=0.5)
