"""Elastic runs as their launcher starts them: environments, restarts, signals, the card; with real processes."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.elastic_launches import MemberRun
from support.signals import check_ignored_hangup

from gossamer.base.run_files import RunFiles
from gossamer.launcher.coordinator import RUN_CARD, read_run_card
from gossamer.launcher.failure import Outcome

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


def test_workers_know_their_coordinator_and_no_fixed_world(run: MemberRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GOSSAMER_SERVERS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    outcome = run(
        """
        names = ("COORDINATOR", "PLACE", "ELASTIC", "TOKEN_FILE")
        print(*(os.environ[f"GOSSAMER_{name}"] for name in names), os.environ["LOCAL_RANK"])
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GOSSAMER_SERVERS", "TORCHELASTIC_RUN_ID"):
            assert name not in os.environ, name
        """,
        range_="2:5",
    )
    assert outcome == Outcome()
    token_file = run.private / "token"
    assert sorted(run.lines) == [(k, f"127.0.0.1:1 {k} 2:5 {token_file} {k}") for k in range(2)]


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
