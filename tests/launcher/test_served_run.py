"""Workers beside servers: losses, errors, restarts and signals of one launched run."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.served_launches import Run, WarmPrograms
from support.signals import check_ignored_hangup

from gossamer.base.run_files import RunFiles
from gossamer.comm.environment.run_token import TOKEN_BYTES, check_token_file, make_token_file
from gossamer.errors import ConnectError, PeerLost
from gossamer.launcher import process, served_run
from gossamer.launcher.failure import Outcome
from gossamer.launcher.job import Job, Serving
from gossamer.launcher.parent_watchdog import OrphanReaper
from gossamer.launcher.process import ManagedProcess, StandbyProcess
from gossamer.launcher.served_run import ServedRun, Servers
from gossamer.launcher.supervisor import Supervisor

pytestmark = pytest.mark.processes


def check_one_loss_ends_nobody_else(run: Run) -> None:
    def tick() -> None:
        if run.notes:
            (run.directory / "seen").touch()

    run.tick = tick
    outcome = run(
        """
        print("server", ask(0)[0], flush=True)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for("seen")
        print("done")
        """,
        workers=3,
    )
    assert outcome == Outcome()
    assert run.notes == ["rank 1 was lost (signal SIGKILL). The other 2 continue."]
    assert sorted(run.lines) == [(0, "done"), (0, "server 0"), (1, "server 0"), (2, "done"), (2, "server 0")]
    assert "signal SIGKILL" in run.log("rank-1")


def test_a_killed_worker_is_named_once_and_the_others_finish(run: Run) -> None:
    check_one_loss_ends_nobody_else(run)


REPLACED = """
attempt, private = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["GOSSAMER_RUN_DIRECTORY"]
open(os.path.join(private, f"attached-{attempt}-{rank}"), "w").close()
if rank == 1 and not attempt:
    while not os.path.exists(os.path.join(private, "standbys")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    print(os.getpid(), os.environ["GOSSAMER_REJOIN"], flush=True)
    tell("replaced")
wait_for("replaced")
"""


def test_a_standby_takes_the_place_of_a_lost_worker(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STANDBY_DELAY_SECONDS", 0.0)
    assert run(REPLACED, workers=2, max_restarts=1, keeps_standby=True) == Outcome(restarts=1)
    pids = (run.private / "standbys").read_text().split()
    assert run.lines == [(1, f"{pids[0]} 1")]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids), "a standby outlived its run"


def test_a_run_keeps_no_standby_if_its_forks_warm_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STANDBY_DELAY_SECONDS", 0.0)
    forks = WarmPrograms(run.private / "standbys")
    assert run(REPLACED, workers=2, max_restarts=1, keeps_standby=True, begin=forks) == Outcome(restarts=1)
    assert forks.file.read_text() == "", "a standby has written its number"


def test_the_check_of_losses_detects_a_mutant_that_takes_them_for_errors(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def takes_for_errors(self: ServedRun, worker: ManagedProcess, exit_code: int, now: float) -> None:
        self.failed += [worker.failure(exit_code)] if exit_code else []

    monkeypatch.setattr(ServedRun, "_worker_ended", takes_for_errors)
    with pytest.raises(AssertionError):
        check_one_loss_ends_nobody_else(run)


def test_a_run_that_lost_everyone_failed(run: Run) -> None:
    outcome = run("os.kill(os.getpid(), signal.SIGKILL)")
    assert outcome.exit_code == 137
    assert outcome.failure is not None
    assert outcome.failure.summary == "all 2 workers were lost, this one last"
    assert "No worker is left" in run.notes[-1]


def check_an_error_ends_all(run: Run) -> None:
    outcome = run(
        """
        if rank == 2:
            tell("gone")
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
            tell("waiting")
            wait_for("overlooked")
            print("not ended")
        wait_for("gone")
        wait_for("waiting")
        sys.exit(7)
        """,
        workers=3,
    )
    assert not run.lines
    assert outcome.failure is not None
    assert (outcome.failure.rank, outcome.exit_code) == (1, 7)


def test_an_error_in_a_worker_ends_all_whatever_was_lost_before(run: Run) -> None:
    check_an_error_ends_all(run)


def test_the_check_of_errors_detects_a_mutant_that_takes_them_for_losses(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def takes_for_losses(self: ServedRun, worker: ManagedProcess, exit_code: int, now: float) -> None:
        self._lost += [worker.failure(exit_code)] if exit_code else []
        (run.directory / "overlooked").touch()

    monkeypatch.setattr(ServedRun, "_worker_ended", takes_for_losses)
    with pytest.raises(AssertionError):
        check_an_error_ends_all(run)


def test_a_real_worker_meets_at_the_launchers_store_and_reports_its_error(run: Run) -> None:
    outcome = run(
        """
        import gossamer
        world = gossamer.init()
        print(world.rank, world.size, os.environ["LOCAL_RANK"], flush=True)
        if rank == 0:
            wait_for("met")
            raise ValueError("bad data")
        tell("met")
        time.sleep(60)
        """,
        worker_module="gossamer.launcher.worker",
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


@pytest.mark.parametrize("first", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"])
def test_a_signal_ends_everyone(run: Run, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "FAILURE_GRACE_SECONDS", 0.3)
    waiting = iter([signal.SIGTERM])

    def tick() -> None:
        if len(run.lines) == 2:  # who is asked before it ignores is not killed
            os.kill(os.getpid(), next(waiting, 0))

    run.tick = tick
    grace_seconds = 0.3 if first else 60.0
    outcome = run(f"{first}\nprint('here', flush=True)\ntime.sleep(60)", server=first, grace_seconds=grace_seconds)
    assert (outcome.exit_code, outcome.failure) == (143, None)
    assert run.notes == (["killed, because they had not ended by then: rank 0, rank 1"] if first else [])


def test_a_sighup_that_is_ignored_ends_nothing(run: Run) -> None:
    """As under nohup, when the terminal closes."""
    check_ignored_hangup(run, lambda: run("print('here', flush=True)\nwait_for('hung-up')", workers=1))


def test_who_asks_twice_does_not_wait_for_the_patient(run: Run) -> None:
    run.tick = lambda: os.kill(os.getpid(), signal.SIGTERM if run.lines else 0)
    began = time.monotonic()
    outcome = run(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('here', flush=True)\ntime.sleep(60)", grace_seconds=60.0
    )
    assert outcome.exit_code == 143
    assert time.monotonic() - began < 30


def test_an_error_while_showing_ends_the_run(run: Run) -> None:
    def tick() -> None:
        raise BrokenPipeError("nobody reads")

    run.tick = tick
    with pytest.raises(BrokenPipeError):
        run("time.sleep(60)")


# -- each its own place, and the run's secret nowhere but in its file --------------------------------------------------


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
        return dict(surroundings(*arguments)) | {"TOLD": (run.private / "token").read_bytes().hex()}

    surroundings = served_run._shared_environment
    monkeypatch.setattr(served_run, "_shared_environment", tells)
    with pytest.raises(AssertionError):
        check_nobody_has_the_secret(run)


def test_every_process_knows_its_place_and_not_an_outer_launchers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("GOSSAMER_REJOIN", "1")
    monkeypatch.setenv("GOSSAMER_COORDINATOR", "127.0.0.1:1")
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
        assert not {"GOSSAMER_REJOIN", "GOSSAMER_COORDINATOR"} & set(found)
    assert {"RANK=1", "LOCAL_RANK=1"} <= set(worker)
    assert {"GOSSAMER_SERVER=0", f"GOSSAMER_JOURNAL={run.private / 'journal-0'}"} <= set(server)
    assert not any(line.startswith(("RANK=", "LOCAL_RANK=")) for line in server)


def test_a_secret_of_ones_own_is_checked_and_used(run: Run) -> None:
    mine = make_token_file(run.directory)
    run(f"assert os.environ['GOSSAMER_TOKEN_FILE'] == {str(mine)!r}", token_file=mine)
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


# -- Servers of a launched run: restarts, standbys, and when the run ends with them ------------------------------------
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


def test_the_check_of_servers_detects_a_mutant_that_loses_the_journal(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
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
assert not os.path.exists(os.path.join(os.path.dirname(__file__), "waits")), "began before this worker trained"
open(os.path.join(os.environ["GOSSAMER_RUN_DIRECTORY"], "attached-0-0"), "w").close()
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


def test_the_check_of_spares_detects_a_mutant_that_does_not_end_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[StandbyProcess] = []
    monkeypatch.setattr(process, "STANDBY_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(StandbyProcess, "close", lambda self: kept.append(self))
    try:
        with pytest.raises(AssertionError, match="a spare outlived"):
            check_the_spare_takes_any_servers_place(run)
    finally:
        waiting = [each._process for each in kept if each._process is not None]  # without that of workers
        assert waiting
        for each_process in waiting:
            each_process.communicate()  # the guard has ended it


def test_the_standby_of_servers_begins_once_the_workers_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Sequence[str]] = []

    def begin(command: Sequence[str], *given: object, **options: object) -> SimpleNamespace:
        made.append(command)
        return SimpleNamespace(pid=1)

    monkeypatch.setattr(process, "STANDBY_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(process, "spawn", begin)
    monkeypatch.setattr(OrphanReaper, "add", lambda self, group: None)
    supervisor = Supervisor(RunFiles(tmp_path), 1.0, lambda note: None, lambda: None)
    job, serving = Job(script=Path("train.py"), logs=tmp_path), Serving(servers=1, standby=("standby",))
    servers = Servers(job, serving, supervisor, {"GOSSAMER_SERVERS": "127.0.0.1:1"}, 1)
    for ends, trains, count in ((False, False, 0), (True, True, 0), (False, True, 1), (False, True, 1)):
        worker = SimpleNamespace(lives=True, trains=trains, age_seconds=1.0)
        servers.look(cast(list[ManagedProcess], [worker]), ends=ends)
        assert made == [("standby",)] * count


HOST_IS_OWN = """
    number = int(os.environ["RANK"]) if "RANK" in os.environ else 2 + int(os.environ["GOSSAMER_SERVER"])
    assert os.environ["GOSSAMER_NETWORK_NAMESPACE"] == f"/run/netns/host-{number}"
"""


def test_on_an_emulated_network_each_worker_and_server_is_told_its_host(run: Run) -> None:
    hosts = tuple(Path(f"/run/netns/host-{number}") for number in range(4))
    assert run(HOST_IS_OWN, workers=2, hosts=hosts, server=HOST_IS_OWN, serving={"servers": 2}) == Outcome()


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
