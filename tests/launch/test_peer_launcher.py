from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from torch.distributed import TCPStore

from gossamer.environment.run_token import TOKEN_BYTES, check_token_file, make_token_file
from gossamer.errors import ConnectError, PeerLost
from gossamer.launch import parent_watchdog, peer_launcher, standby, supervisor
from gossamer.launch.failure import Outcome
from gossamer.launch.job import Job, Serving
from gossamer.launch.logs.run_files import RunFiles
from gossamer.launch.parent_watchdog import OrphanReaper, left
from gossamer.launch.peer_launcher import launch_peers
from gossamer.launch.ports import PORTS, free_endpoints
from gossamer.launch.process import ManagedProcess
from gossamer.launch.rendezvous import serve_store
from gossamer.launch.standby import StandbyProcess
from gossamer.launch.supervisor import Supervisor

# Starts in no time, unlike one that imports torch; of the real one there is a test below
TINY_WORKER = """
import runpy, sys
script, *sys.argv[1:] = sys.argv[1:]
runpy.run_path(script, run_name="__main__")
"""
SERVER = """
import os, signal, socket, sys
k = int(os.environ["GOSSAMER_SERVER"])
host, port = os.environ["GOSSAMER_SERVERS"].split(",")[k].split(":")
journal = os.path.join(os.environ["GOSSAMER_JOURNAL"], "starts")
with open(journal, "a") as file:
    file.write("x")
{}
with socket.create_server((host, int(port))) as listener:
    while True:
        taken, _ = listener.accept()
        with taken:
            taken.sendall(f"{{k}} {{os.getpid()}} {{os.path.getsize(journal)}}".encode())
"""
WORKER = """
import os, signal, socket, sys, time
rank = int(os.environ["RANK"])
def ask(server):
    host, port = os.environ["GOSSAMER_SERVERS"].split(",")[server].split(":")
    while True:
        try:
            with socket.create_connection((host, int(port))) as link:
                server, pid, starts = map(int, link.makefile().read().split())
                return server, pid, starts
        except (ConnectionError, ValueError):  # not there, or gone before it had answered
            time.sleep(0.01)
def wait_for(name):
    while not os.path.exists(os.path.join(os.path.dirname(__file__), name)):
        time.sleep(0.01)
def tell(name):
    open(os.path.join(os.path.dirname(__file__), name), "w").close()
"""

pytestmark = pytest.mark.processes


@dataclass
class Run:
    """Launches scripts beside servers, and keeps what was shown."""

    directory: Path
    lines: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tick: Callable[[], None] = lambda: None

    def __call__(self, script: str, *, server: str = "", serving: dict[str, Any] | None = None, **job: Any) -> Outcome:
        for name, text in {
            "tiny.py": TINY_WORKER,
            "server.py": SERVER.format(dedent(server)),
            "script.py": WORKER + dedent(script),
        }.items():
            (self.directory / name).write_text(text)
        self.private.mkdir()
        command = (sys.executable, "-S", "-u", str(self.directory / "server.py"))
        options = {"worker_module": "tiny", "settings": {"PYTHONPATH": str(self.directory)}} | job
        return launch_peers(
            Job(script=self.directory / "script.py", logs=self.directory / "logs", **options),
            Serving(**({"servers": 1, "command": command, "standby": ()} | (serving or {}))),
            self.private,
            show=lambda rank, line: self.lines.append((rank, line)),
            note=self.notes.append,
            tick=lambda: self.tick(),
        )

    @property
    def private(self) -> Path:
        return self.directory / "private"

    def log(self, name: str) -> str:
        return (self.directory / "logs" / f"{name}.log").read_text()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    started = [RunFiles(run.private).newest_start(number) for number in range(6)]
    for each in filter(None, started):
        assert not Path(f"/proc/{each['pid']}").exists(), "a process outlived its run"


def check_one_loss_ends_nobody_else(run: Run) -> None:
    outcome = run(
        """
        print("server", ask(0)[0], flush=True)
        if rank == 1:
            tell("dying")
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for("dying")
        time.sleep(0.1)
        print("done")
        """,
        workers=3,
    )
    assert outcome == Outcome()
    assert run.notes == ["rank 1 was lost (signal SIGKILL). The other 2 go on."]
    assert sorted(run.lines) == [(0, "done"), (0, "server 0"), (1, "server 0"), (2, "done"), (2, "server 0")]
    assert "signal SIGKILL" in run.log("rank-1")


def test_a_killed_worker_is_named_once_and_the_others_finish(run: Run) -> None:
    check_one_loss_ends_nobody_else(run)


def test_the_check_of_losses_notices_who_takes_them_for_errors(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_for_errors(self: Supervisor, worker: ManagedProcess, exit_code: int) -> None:
        self._failed += [self._failure(worker, exit_code, stopped=False)] if exit_code else []

    monkeypatch.setattr(Supervisor, "_worker_ended", takes_for_errors)
    with pytest.raises(AssertionError):
        check_one_loss_ends_nobody_else(run)


def test_a_run_that_lost_everyone_failed(run: Run) -> None:
    outcome = run("os.kill(os.getpid(), signal.SIGKILL)")
    assert outcome.exit_code == 137
    assert outcome.failure is not None
    assert outcome.failure.summary == "all 2 workers were lost, this one last"
    assert "Nobody is left" in run.notes[-1]


def check_an_error_ends_all(run: Run) -> None:
    outcome = run(
        """
        if rank == 2:
            tell("gone")
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            time.sleep(0.5)
            print("not ended")
        wait_for("gone")
        sys.exit(7)
        """,
        workers=3,
    )
    assert not run.lines
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.exit_code) == (1, 7)


def test_an_error_in_a_worker_ends_all_whatever_was_lost_before(run: Run) -> None:
    check_an_error_ends_all(run)


def test_the_check_of_errors_notices_who_takes_them_for_losses(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_for_losses(self: Supervisor, worker: ManagedProcess, exit_code: int) -> None:
        self._lost += [self._failure(worker, exit_code, stopped=False)] if exit_code else []

    monkeypatch.setattr(Supervisor, "_worker_ended", takes_for_losses)
    with pytest.raises(AssertionError):
        check_an_error_ends_all(run)


def test_a_real_worker_meets_at_the_launchers_store_and_reports_its_error(run: Run) -> None:
    outcome = run(
        """
        import gossamer
        world = gossamer.init()
        print(world.rank, world.size, os.environ["LOCAL_RANK"], flush=True)
        if rank == 0:
            raise ValueError("bad data")
        time.sleep(60)
        """,
        worker_module="gossamer.launch.worker",
    )
    assert sorted(run.lines) == [(0, "0 2 0"), (1, "1 2 1")]
    assert outcome.failure is not None
    assert outcome.failure.summary == "ValueError: bad data"
    assert run.log("rank-0").count("ValueError: bad data") == 1
    assert "rank 1 was stopped" in run.log("rank-1")


def test_a_lost_worker_is_started_again_alone_as_often_as_allowed(run: Run) -> None:
    outcome = run(
        """
        print(os.environ.get("GOSSAMER_REJOIN"), os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        max_restarts=2,
    )
    assert outcome == Outcome(restarts=2)
    assert sorted(run.lines) == [(0, "None 0"), (1, "1 1"), (1, "1 2"), (1, "None 0")]
    assert [note.partition("). ")[2] for note in run.notes[:2]] == [
        f"Restarting it alone ({attempt} of at most 2)." for attempt in (1, 2)
    ]
    assert run.log("rank-1").count("# rank 1 attempt") == 2


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


def test_a_killed_server_returns_to_its_port_and_its_journal(run: Run) -> None:
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
"""


def check_the_spare_takes_any_servers_place(run: Run) -> None:
    (run.directory / "spare.py").write_text(SPARE)
    command = (sys.executable, "-S", "-u", str(run.directory / "spare.py"))
    assert run(KILL_SERVERS, workers=1, serving={"servers": 2, "standby": command}) == Outcome()
    assert run.lines == [(0, "1 1 2 True"), (0, "0 0 2 True")]
    pids = (run.directory / "waits").read_text().split()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a spare outlived its run"


def test_a_spare_takes_the_place_of_any_server(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "DELAY_SECONDS", 0.0)
    check_the_spare_takes_any_servers_place(run)


def test_the_check_of_spares_notices_who_does_not_end_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[StandbyProcess] = []
    monkeypatch.setattr(standby, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(StandbyProcess, "close", lambda self: kept.append(self))
    try:
        with pytest.raises(AssertionError, match="a spare outlived"):
            check_the_spare_takes_any_servers_place(run)
    finally:
        for process in (each._process for each in kept):
            assert process is not None
            process.communicate()  # the guard has ended it


def test_on_hosts_of_their_own_each_server_has_a_spare_of_its_own(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "DELAY_SECONDS", 0.0)
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
    monkeypatch.setattr(supervisor, "SERVER_RESTARTS", 2)
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
    monkeypatch.setattr(supervisor, "SETTLED_SECONDS", 0.0)
    fails_once = "if os.path.getsize(journal) == 1: raise RuntimeError('once')"
    assert run("print(ask(0)[2])", workers=1, server=fails_once) == Outcome()
    assert run.lines == [(0, "2")]


@pytest.mark.parametrize("first", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_a_signal_ends_everyone(run: Run, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.3)
    waiting = iter([signal.SIGINT])

    def tick() -> None:
        if run.lines:
            os.kill(os.getpid(), next(waiting, 0))

    run.tick = tick
    outcome = run(f"{first}\nprint('here', flush=True)\ntime.sleep(60)", server=first)
    assert (outcome.exit_code, outcome.failure) == (130, None)
    assert not run.notes


def test_who_asks_twice_does_not_wait_for_the_patient(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 60.0)
    run.tick = lambda: os.kill(os.getpid(), signal.SIGTERM if run.lines else 0)
    began = time.monotonic()
    outcome = run("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('here', flush=True)\ntime.sleep(60)")
    assert outcome.exit_code == 143
    assert time.monotonic() - began < 30


def test_an_error_while_showing_ends_the_run(run: Run) -> None:
    def tick() -> None:
        raise BrokenPipeError("nobody reads")

    run.tick = tick
    with pytest.raises(BrokenPipeError):
        run("time.sleep(60)")


def test_faults_find_servers_after_the_workers(run: Run) -> None:
    def tick() -> None:
        started = RunFiles(run.private).newest_start(2)
        if started is not None and run.lines and not run.notes:
            os.killpg(started["pid"], signal.SIGKILL)

    run.tick = tick
    assert run("ask(0); print('up', flush=True)\nwhile ask(0)[2] < 2: pass", workers=2) == Outcome()
    assert len(run.notes) == 1


SHOW = 'print(*sys.argv, *(f"{name}={value}" for name, value in os.environ.items()), sep="\\n", flush=True)\n'


def check_nobody_has_the_secret(run: Run) -> None:
    assert run(SHOW + "ask(0)", server=SHOW, workers=2) == Outcome()
    path = run.private / "token"
    token = path.read_bytes()
    assert (stat.S_IMODE(path.stat().st_mode), len(token)) == (0o600, TOKEN_BYTES)
    elsewhere = b"".join(file.read_bytes() for file in run.directory.rglob("*") if file.is_file() and file != path)
    assert b"GOSSAMER_TOKEN_FILE=%s\n" % bytes(path) in elsewhere
    assert not any(form in elsewhere for form in (token, token.hex().encode(), repr(token).encode()))


def test_the_secret_is_in_its_file_and_nowhere_else(run: Run) -> None:
    check_nobody_has_the_secret(run)


def test_the_check_of_secrets_notices_one_in_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def tells(*arguments: Any) -> dict[str, str]:
        return dict(shared_environment(*arguments)) | {"TOLD": (run.private / "token").read_bytes().hex()}

    shared_environment = peer_launcher._shared_environment
    monkeypatch.setattr(peer_launcher, "_shared_environment", tells)
    with pytest.raises(AssertionError):
        check_nobody_has_the_secret(run)


def test_every_process_knows_its_place_and_not_an_outer_launchers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("GOSSAMER_REJOIN", "1")
    assert run(SHOW + "ask(0)", server=SHOW, workers=2, recipe="Dense()") == Outcome()
    worker = [line for rank, line in run.lines if rank == 1]
    server = [note.removeprefix("server 0: ") for note in run.notes]
    for lines in (worker, server):
        found = dict(line.split("=", 1) for line in lines if "=" in line)
        assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"], found["MASTER_ADDR"]) == ("2", "2", "127.0.0.1")
        assert (found["TORCHELASTIC_USE_AGENT_STORE"], found["GOSSAMER_RECIPE"]) == ("True", "Dense()")
        assert found["GOSSAMER_SERVERS"].startswith("127.0.0.1:")
        assert int(found["MASTER_PORT"]) > 0
        assert len(found["GOSSAMER_RUN"]) == 16
        assert "GOSSAMER_REJOIN" not in found
    assert {"RANK=1", "LOCAL_RANK=1"} <= set(worker)
    assert {"GOSSAMER_SERVER=0", f"GOSSAMER_JOURNAL={run.private / 'journal-0'}"} <= set(server)
    assert not any(line.startswith(("RANK=", "LOCAL_RANK=")) for line in server)


def test_a_secret_of_ones_own_is_checked_and_used(run: Run) -> None:
    mine = make_token_file(run.directory)
    run(f"assert os.environ['GOSSAMER_TOKEN_FILE'] == {str(mine)!r}", serving={"token_file": mine})
    assert not (run.private / "token").exists()
    with pytest.raises(ConnectError, match="No such file"):
        check_token_file(run.directory / "none")
    mine.chmod(0o640)
    with pytest.raises(ConnectError, match=f"chmod 600 {mine}"):
        check_token_file(mine)
    mine.chmod(0o600)
    mine.write_bytes(b"short")
    with pytest.raises(ConnectError, match="at least 32 bytes"):
        check_token_file(mine)
    with pytest.raises(ConnectError, match="at least 32 bytes"):
        check_token_file(run.directory)


def test_places_for_servers_differ_and_are_not_handed_out_to_who_dials() -> None:
    endpoints = free_endpoints("127.0.0.1", 50)
    assert len(set(endpoints)) == 50
    assert all(int(endpoint.rpartition(":")[2]) in PORTS for endpoint in endpoints)
    with pytest.raises(ConnectError, match="--interface NAME"):
        free_endpoints("192.0.2.1", 1)  # nobody's


def test_a_taken_place_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("gossamer.launch.ports.PORTS", range(port, port + 1))
        assert free_endpoints("127.0.0.1", 1) == ()


def check_it_listens_at_one_address_only(endpoint: str) -> None:
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.2", int(endpoint.rpartition(":")[2])))
        except OSError:
            raise AssertionError("somebody listens on every address") from None


def test_the_store_listens_where_it_was_asked_to_and_nowhere_else() -> None:
    store, endpoint = serve_store("127.0.0.1:0")
    store.set("key", "value")
    check_it_listens_at_one_address_only(endpoint)
    with pytest.raises(ConnectError, match="cannot listen at"):
        serve_store(endpoint)
    anywhere = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(AssertionError):
        check_it_listens_at_one_address_only(f"127.0.0.1:{anywhere.port}")


LAUNCHER = """
import subprocess, sys
sys.path.insert(0, sys.argv[2])  # without the rest of the package, which takes seconds
from parent_watchdog import OrphanReaper
with OrphanReaper() as guard:
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
        [sys.executable, "-S", "-c", LAUNCHER.format(registration), STANDING, LAUNCH_FOLDER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as launcher:  # fmt: skip
        assert launcher.stdout is not None
        pids = [int(launcher.stdout.readline()) for _ in range(2)]
        opened = [os.pidfd_open(pid) for pid in pids]
        launcher.kill()
        ended = [bool(select.select([file], [], [], seconds)[0]) for file in opened]
        for pid, file in zip(pids, opened, strict=True):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.close(file)
    assert all(ended)


watched = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs file descriptors of processes (Linux)")


@watched
def test_nothing_outlives_a_killed_launcher() -> None:
    check_nothing_outlives_a_killed_launcher("guard.add(child.pid)", 5)


@watched
def test_the_check_of_who_outlives_notices_them() -> None:
    with pytest.raises(AssertionError):
        check_nothing_outlives_a_killed_launcher("guard.add(child.pid); guard.remove(child.pid)", 0.1)


def test_the_guard_leaves_alone_what_ended_before() -> None:
    assert left(["+3\n", "+4\n", "-3\n", "-5\n", "+6\n"]) == {4, 6}


def test_a_run_goes_on_without_its_guard(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    enter = OrphanReaper.__enter__

    def killed(self: OrphanReaper) -> OrphanReaper:
        enter(self)._process.kill()
        self._process.wait()
        return self

    monkeypatch.setattr(OrphanReaper, "__enter__", killed)
    assert run("print(ask(0)[0])", workers=1) == Outcome()
