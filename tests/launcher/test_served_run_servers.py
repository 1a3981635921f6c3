"""Servers of a launched run: restarts, standbys, and when the run ends with them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from support.served_launches import Run

from gossamer.base.run_files import RunFiles
from gossamer.errors import PeerLost
from gossamer.launcher import process, served_run
from gossamer.launcher.failure import Outcome
from gossamer.launcher.process import ManagedProcess, StandbyProcess

pytestmark = pytest.mark.processes
KILL_SERVER = """
first = ask(0)
os.kill(first[1], signal.SIGKILL)
again = first
while again[1] == first[1]:
    again = ask(0)
print(first[2], again[2])
"""


def check_a_server_returns(run: Run) -> None:
    assert run(KILL_SERVER, workers=1, serving={"servers": 2}) == Outcome()
    assert run.lines == [(0, "1 2")]
    (note,) = run.notes
    assert note.startswith("server 0 ended with signal SIGKILL. Restarting it at 127.0.0.1:")
    assert "1 of at most 10" in note
    assert run.log("server-0").count("# server 0 starts") == 2
    assert run.log("server-1").count("# server 1 starts") == 1


def test_promise_2_a_killed_server_returns_to_its_port_and_its_journal(run: Run) -> None:
    check_a_server_returns(run)


def test_the_check_of_servers_notices_who_loses_the_journal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    start = ManagedProcess.start

    def forgets(self: ManagedProcess) -> None:
        if self.attempt >= 0:  # again: at the first start a server may be writing it
            for journal in run.private.glob("journal-*/starts"):
                journal.unlink()
        start(self)

    monkeypatch.setattr(ManagedProcess, "start", forgets)
    with pytest.raises(AssertionError):
        check_a_server_returns(run)


SPARE = """
import json, os, runpy, sys
with open(os.path.join(os.path.dirname(__file__), "waits"), "a") as file:
    print(os.getpid(), file=file)
if line := sys.stdin.readline():
    os.environ.update(json.loads(line))
    runpy.run_path(os.path.join(os.path.dirname(__file__), "server.py"))
"""
KILL_SERVERS = """
pids = [ask(0)[1], ask(1)[1]]
for server in (1, 0):
    waiting = lambda: open(os.path.join(os.path.dirname(__file__), "waits")).readlines()[1 - server:]
    wait_for("waits")
    while not waiting():
        time.sleep(0.01)
    os.kill(pids[server], signal.SIGKILL)
    while (again := ask(server))[1] == pids[server]:
        pass
    print(server, *again[::2], again[1] == int(waiting()[0]))
while len(open(os.path.join(os.path.dirname(__file__), "waits")).readlines()) < 3:  # the last, whom nobody takes
    time.sleep(0.01)
"""


def check_the_spare_takes_any_servers_place(run: Run) -> None:
    (run.directory / "spare.py").write_text(SPARE)
    command = (sys.executable, "-S", "-u", str(run.directory / "spare.py"))
    assert run(KILL_SERVERS, workers=1, serving={"servers": 2, "standby": command}) == Outcome()
    assert run.lines == [(0, "1 1 2 True"), (0, "0 0 2 True")]
    pids = (run.directory / "waits").read_text().split()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a spare outlived its run"


def test_a_spare_takes_the_place_of_any_server(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STANDBY_DELAY_SECONDS", 0.0)
    check_the_spare_takes_any_servers_place(run)


def test_the_check_of_spares_notices_who_does_not_end_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[StandbyProcess] = []
    monkeypatch.setattr(process, "STANDBY_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(StandbyProcess, "close", lambda self: kept.append(self))
    try:
        with pytest.raises(AssertionError, match="a spare outlived"):
            check_the_spare_takes_any_servers_place(run)
    finally:
        for each in kept:
            assert each._process is not None
            each._process.communicate()  # the guard has ended it


def test_on_hosts_of_their_own_each_server_has_a_spare_of_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STANDBY_DELAY_SECONDS", 0.0)
    (run.directory / "spare.py").write_text(SPARE)
    command = (sys.executable, "-S", "-u", str(run.directory / "spare.py"))
    script = """
        wait_for("waits")
        while len(open(os.path.join(os.path.dirname(__file__), "waits")).readlines()) < 2:
            time.sleep(0.01)
    """
    prefix = ("env", "HOST=${local_rank}")
    assert run(script, workers=1, prefix=prefix, serving={"servers": 2, "standby": command}) == Outcome()
    assert sorted(path.name for path in run.private.glob("spare-?.txt")) == ["spare-1.txt", "spare-2.txt"]


def test_a_server_that_never_stays_ends_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_run, "SERVER_RESTARTS", 2)
    with pytest.raises(PeerLost, match=r"Server 0 ended 3 times, the last time with signal SIGKILL.*--servers 2"):
        run("time.sleep(60)", server="os.kill(os.getpid(), signal.SIGKILL)")
    assert len(run.notes) == 2
    assert (run.private / "journal-0" / "starts").read_text() == "xxx"


def test_a_server_that_cannot_start_is_not_started_again(run: Run) -> None:
    with pytest.raises(PeerLost, match=r"failed at its start \(exit code 1\)"):
        run("time.sleep(60)", server="raise RuntimeError('no such recipe')")
    assert "server 0: RuntimeError: no such recipe" in run.notes
    assert (run.private / "journal-0" / "starts").read_text() == "x"


def test_a_server_that_served_and_then_failed_is_started_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_run, "SETTLED_SECONDS", 0.0)
    fails_once = "if os.path.getsize(journal) == 1: raise RuntimeError('once')"
    assert run("print(ask(0)[2])", workers=1, server=fails_once) == Outcome()
    assert run.lines == [(0, "2")]


def test_faults_find_servers_after_the_workers(run: Run) -> None:
    def tick() -> None:
        started = RunFiles(run.private).newest_start(2)
        if started is not None and run.lines and not run.notes:
            os.killpg(started["pid"], signal.SIGKILL)

    run.tick = tick
    assert run("ask(0); print('up', flush=True)\nwhile ask(0)[2] < 2: pass", workers=2) == Outcome()
    assert len(run.notes) == 1
