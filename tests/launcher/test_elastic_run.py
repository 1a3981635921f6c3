"""Elastic runs as their launcher starts them: environments, restarts, signals, the card; with real processes."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.elastic_launches import WORKER, MemberRun
from support.served_launches import WarmPrograms
from support.signals import check_ignored_hangup

from gossamer.base.peer_ops import Peer
from gossamer.base.run_files import RunFiles
from gossamer.comm.environment.run_token import make_token
from gossamer.comm.membership.messages import RELAY_SERVER
from gossamer.launcher import process
from gossamer.launcher.coordinator import RUN_CARD, RemoteCoordinator, read_run_card
from gossamer.launcher.elastic_run import INVITED, NO_WAY_BACK, journal_path, server_endpoints
from gossamer.launcher.failure import Outcome
from gossamer.launcher.job import Elasticity, Job, WorkerRange
from gossamer.launcher.process import StandbyProcess
from gossamer.launcher.served_run import free_endpoints

pytestmark = pytest.mark.processes


@pytest.fixture
def run(tmp_path: Path) -> Iterator[MemberRun]:
    run = MemberRun(tmp_path)
    yield run
    for number in range(6):
        if started := RunFiles(run.private).newest_start(number):
            assert not Path(f"/proc/{started['pid']}").exists(), "a process outlived its run"


def check_one_loss_is_made_good(run: MemberRun) -> None:
    outcome = run(
        """
        reach("attached")
        print("member", os.environ["GOSSAMER_MEMBER"])
        if place == 1 and not attempt:
            os.kill(os.getpid(), signal.SIGKILL)
        tell(f"came-{place}-{attempt}")
        for name in ("came-0-0", "came-1-1", "came-2-0"):
            wait_for(name)
        """,
        workers=3,
        max_restarts=2,
    )
    assert outcome == Outcome(restarts=1)
    assert run.notes == ["rank 1 was lost (signal SIGKILL). The other 2 continue; restarting it (1 of at most 2)."]
    members = {(rank, int(line.split()[1])) for rank, line in run.lines}
    assert len(members) == 4, "another number after each start"
    assert set(run.coordinator.buried) == {number for _, number in members}
    assert run.coordinator.buried[0] in {number for rank, number in members if rank == 1}
    assert run.sizes[0] == (3, 3)


def test_a_lost_worker_is_started_again_alone(run: MemberRun) -> None:
    check_one_loss_is_made_good(run)


def test_the_check_of_losses_notices_numbers_that_are_used_twice(
    run: MemberRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossamer.launcher.elastic_run.secrets.randbits", lambda bits: 7)
    with pytest.raises(AssertionError):
        check_one_loss_is_made_good(run)


REPLACED = """
reach("attached")
if place == 1 and not attempt:
    wait_for("standbys", run)
    os.kill(os.getpid(), signal.SIGKILL)
print(attempt, os.getpid(), os.environ["GOSSAMER_MEMBER"], flush=True)
if place == 1:
    tell("replaced")
wait_for("replaced")
"""


def check_a_standby_takes_the_place_of_a_lost_worker(run: MemberRun, **job: Any) -> None:
    assert run(REPLACED, max_restarts=2, **job) == Outcome(restarts=1)
    pids = (run.private / "standbys").read_text().split()
    members = {(rank, *line.split()) for rank, line in run.lines}
    assert [pid for rank, attempt, pid, _ in members if (rank, attempt) == (1, "1")] == pids[:1]
    assert len({member for *_, member in members}) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "a standby outlived its run"


def test_a_standby_takes_the_place_of_a_lost_worker(run: MemberRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STANDBY_DELAY_SECONDS", 0.0)
    check_a_standby_takes_the_place_of_a_lost_worker(run, keeps_standby=True)


def test_a_run_keeps_no_standby_if_its_forks_warm_up(run: MemberRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STANDBY_DELAY_SECONDS", 0.0)
    forks = WarmPrograms(run.private / "standbys")
    assert run(REPLACED, max_restarts=2, keeps_standby=True, begin=forks) == Outcome(restarts=1)
    assert forks.file.read_text() == "", "a standby has written its number"


def test_the_check_of_standbys_notices_one_that_is_not_used(run: MemberRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STANDBY_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(StandbyProcess, "take", lambda self, *given: process.spawn(*given))
    with pytest.raises(AssertionError):
        check_a_standby_takes_the_place_of_a_lost_worker(run, keeps_standby=True)


def test_workers_know_their_coordinator_and_no_fixed_world(run: MemberRun, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GOSSAMER_SERVERS", "TORCHELASTIC_RUN_ID", "GOSSAMER_SERVER")
    for name in outer:
        monkeypatch.setenv(name, "1")
    outcome = run(
        f"""
        names = ("COORDINATOR", "PLACE", "ELASTIC", "TOKEN_FILE")
        print(*(os.environ["GOSSAMER_" + name] for name in names), os.environ["LOCAL_RANK"])
        for name in {outer}:
            assert name not in os.environ, name
        """,
        range_="2:5",
    )
    assert outcome == Outcome()
    token_file = run.private / "token"
    assert sorted(run.lines) == [(k, f"127.0.0.1:1 {k} 2:5 {token_file} {k}") for k in range(2)]


class LaunchedRelay:
    """The relay of a launcher that has joined a run."""

    me = Peer(RELAY_SERVER, 77)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("joins", "relays", "number"), [(False, True, "0"), (True, True, "77"), (False, False, "")])
def test_workers_recognize_the_relay_on_their_machine(
    run: MemberRun, monkeypatch: pytest.MonkeyPatch, joins: bool, relays: bool, number: str
) -> None:
    monkeypatch.setenv("GOSSAMER_RELAY", "5")  # of an outer run
    if joins:
        relay: Any = LaunchedRelay()
        run.coordinate = lambda *given: RemoteCoordinator(("127.0.0.1", 9), "run", relay)
    script = 'print(repr(os.environ["GOSSAMER_RELAY"]))'
    assert run(script, joins=joins, relays=relays, workers=1) == Outcome()
    assert run.lines == [(0, repr(number))]


def test_workers_have_the_name_of_the_coordinators_run(run: MemberRun) -> None:
    run.coordinator.run = "feedfeedfeedfeedfeed"
    assert run('print(os.environ["GOSSAMER_RUN"])', workers=1) == Outcome()
    assert run.lines == [(0, "feedfeedfeedfeed")]


def test_others_find_the_run_by_a_card_without_a_secret_while_it_lasts(run: MemberRun) -> None:
    found = []

    def tick() -> None:
        card = run.logs / RUN_CARD
        if card.exists() and not found and card.stat().st_size:
            found.append((stat.S_IMODE(card.stat().st_mode), card.read_text(), read_run_card(run.logs)))
            run.tell("seen")

    run.tick = tick
    assert run("wait_for('seen')") == Outcome()
    mode, text, card = found[0]
    assert (mode, card.address, card.token_file) == (0o600, ("127.0.0.1", 1), run.private / "token")
    assert json.loads(text) == {"coordinator": "127.0.0.1:1", "token_file": str(run.private / "token")}
    assert not (run.logs / RUN_CARD).exists()


STOPPABLE = """
def end(*_):
    print("all" if os.path.exists(os.path.join(run, "stopping")) else "alone", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
reach("entered"), tell(f"ready-{place}")
signal.pause()
"""


def test_a_sighup_that_is_ignored_ends_nothing(run: MemberRun) -> None:
    script = "reach('attached')\nprint('here', flush=True)\nwait_for('hung-up')"
    check_ignored_hangup(run, lambda: run(script, workers=1))


def stop_when_ready(run: MemberRun, workers: int) -> None:
    signaled = []

    def tick() -> None:
        if not signaled and all((run.directory / f"ready-{place}").exists() for place in range(workers)):
            signaled.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    run.tick = tick


def check_who_is_told_to_stop(run: MemberRun, *, joins: bool, told: str) -> None:
    stop_when_ready(run, 2)
    assert run(STOPPABLE, joins=joins) == Outcome(signal=signal.SIGTERM)
    assert sorted(run.lines) == [(0, told), (1, told)]


@pytest.mark.parametrize(("joins", "told"), [(False, "all"), (True, "alone")])
def test_a_launcher_asks_all_to_stop_and_one_that_joined_lets_its_own_leave(
    run: MemberRun, joins: bool, told: str
) -> None:
    check_who_is_told_to_stop(run, joins=joins, told=told)


def test_the_check_of_stops_notices_workers_that_are_not_told(run: MemberRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunFiles, "stopping", property(lambda self: self.directory / "said to nobody"))
    with pytest.raises(AssertionError):
        check_who_is_told_to_stop(run, joins=False, told="all")


def test_too_few_may_save_before_the_run_ends_resumable(run: MemberRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOSSAMER_TIMEOUT", "0.3")
    outcome = run(
        f"reach('attached')\nif place: wait_for('ready-0'), os.kill(os.getpid(), signal.SIGKILL)\n{STOPPABLE}",
        range_="2:4",
        recipe="TopK(density=0.01)",
        arguments=("--rate", "1"),
    )
    assert outcome.exit_code == 75
    assert run.lines == [(0, "all")]
    assert run.notes[-1].endswith(
        f"To add some: gossamer run --join 127.0.0.1:1 --token-file {run.private / 'token'} --workers 1 "
        f"--recipe 'TopK(density=0.01)' {run.directory / 'script.py'} --rate 1"
    )


def test_more_workers_are_started_when_somebody_asks(run: MemberRun) -> None:
    def tick() -> None:
        if (run.directory / "ready").exists():
            run.tick = lambda: None
            run.coordinator.request = 3

    run.tick = tick
    assert run("tell('ready') if place < 2 else tell('third')\nwait_for('third')\nprint(place)") == Outcome()
    assert sorted(run.lines) == [(0, "0"), (1, "1"), (2, "2")]
    assert (3, 3) in run.sizes
    assert (run.logs / "rank-2.log").exists()


def test_a_worker_that_leaves_is_no_loss(run: MemberRun) -> None:
    outcome = run("reach('attached')\nif place: reach('left')\nelse: wait_for('left-0-1', run)", max_restarts=3)
    assert outcome == Outcome()
    assert run.notes in (
        ["rank 1 has left the run. The other one continues."],
        ["rank 1 has left the run. No worker is left to train."],
    )


# -- killed ------------------------------------------------------------------------------------------------------------

# The first launcher of an elastic run is killed, and the same command is written again, with real processes.


MEMBER = """
from gossamer.comm.environment.run_token import run_token
from gossamer.comm.elastic.agent import MembershipAgent, read_address
agent = MembershipAgent(
    read_address(os.environ["GOSSAMER_COORDINATOR"]), run_token(), number=int(os.environ["GOSSAMER_MEMBER"])
)
agent.here(("127.0.0.1", 1))
if agent.formed:
    agent.ready('{}')
view = agent.view_after(0, 60)
agent.caught_up() if agent.formed else agent.attached('{}')
reach("attached")
if not agent.formed:
    tell("begun")
    signal.pause()
before = view.numbers
is_survivor = not os.path.exists(os.path.join(here, "killed"))
if is_survivor:
    tell("joined")
    while view.world != 2 or view.numbers == before:
        view = agent.view_after(view.number, 60)
print("survived" if is_survivor else "came later", flush=True)
agent.leave(finished=True), agent.close()
"""


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def test_promise_22_the_same_command_continues_the_run_of_a_launcher_that_was_killed(tmp_path: Path) -> None:
    """One worker beside the coordinator, and one of another launcher, whose process outlives the first launcher."""
    (endpoint,) = free_endpoints("127.0.0.1", 1)
    make_token(tmp_path / "token")
    (tmp_path / "script.py").write_text(WORKER + MEMBER)
    common = [sys.executable, "-m", "gossamer", "run", "--token-file", "token"]
    first = [*common, "--workers", "1:2:1", "--listen", endpoint, str(tmp_path / "script.py")]

    def start(*command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    started = [start(*first)]
    try:
        wait_for(tmp_path / "begun", started[0])
        started.append(start(*common, "--join", endpoint, "--workers", "1", str(tmp_path / "script.py")))
        wait_for(tmp_path / "joined", started[1])
        (tmp_path / "killed").touch()
        started[0].send_signal(signal.SIGKILL)
        started[0].communicate()
        started.append(start(*first))
        survivor, again = (each.communicate(timeout=150)[0] for each in started[1:])
        assert [each.returncode for each in started[1:]] == [0, 0], survivor + again
        assert "survived" in survivor
        assert "so it continues" in again
        assert "came later" in again
        assert not list((tmp_path / "runs").glob(".coordinator-journal-*"))
    finally:
        for each in started:
            if each.poll() is None:
                each.kill()
                each.communicate()


def test_a_launcher_that_the_same_command_would_not_continue_reports_it(tmp_path: Path) -> None:
    """The port and the token are new in each start."""
    run = MemberRun(tmp_path)
    run.coordinator.address = "192.0.2.1", 7
    assert run("pass", interface="lo").exit_code == 0
    assert run.notes[:2] == [
        INVITED.format(path=run.logs / "invitation", file="invitation", program=run.directory / "script.py"),
        NO_WAY_BACK,
    ]
    assert run.secrets == ["gossamer:86400.0-None"]
    assert not any("gossamer:" in note for note in run.notes)


def test_servers_listen_at_the_ports_after_that_of_the_coordinator() -> None:
    assert server_endpoints("10.0.0.1", 29700, 2) == ("10.0.0.1:29701", "10.0.0.1:29702")
    free = server_endpoints("127.0.0.1", 0, 2)
    assert len({*free}) == 2
    assert all(endpoint.startswith("127.0.0.1:") for endpoint in free)


def test_a_run_with_servers_is_not_continued_by_the_same_command(tmp_path: Path) -> None:
    token = tmp_path / "token"
    job = Job(script=Path("train.py"), logs=tmp_path / "logs", token_file=token)
    lock_step = Elasticity(range=WorkerRange(least=1, most=2, initial=2), listen=("10.0.0.1", 29700))
    assert journal_path(job, lock_step, b"") is not None
    assert journal_path(job, replace(lock_step, servers=("10.0.0.1:29701",)), b"") is None
