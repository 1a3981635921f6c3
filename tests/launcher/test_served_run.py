"""Workers beside servers: losses, errors, restarts and signals of one launched run."""

from __future__ import annotations

import os
import signal
import time

import pytest
from support.served_launches import Run
from support.signals import check_ignored_hangup

from gossamer.launcher import process
from gossamer.launcher.failure import Outcome
from gossamer.launcher.process import ManagedProcess
from gossamer.launcher.served_run import ServedRun

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


def test_the_check_of_losses_notices_who_takes_them_for_errors(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_check_of_errors_notices_who_takes_them_for_losses(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
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
