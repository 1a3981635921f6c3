from __future__ import annotations

import signal

import pytest

from gossamer.errors import PeerLost
from gossamer.launcher.failure import Failure, Origin, cause, from_exit, is_echo


def failed(rank: int, origin: Origin, moment: float, exit_code: int = 1) -> Failure:
    return Failure(rank=rank, exit_code=exit_code, moment=moment, origin=origin, summary=origin.name)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([failed(0, Origin.ECHO, 1.0), failed(1, Origin.RAISED, 2.0)], 1),
        ([failed(0, Origin.RAISED, 2.0), failed(1, Origin.RAISED, 1.0)], 1),
        ([failed(0, Origin.RAISED, 1.0), failed(1, Origin.KILLED, 2.0)], 1),
        ([failed(0, Origin.STOPPED, 0.0), failed(1, Origin.ECHO, 2.0)], 1),
        ([failed(0, Origin.ECHO, 2.0), failed(1, Origin.ECHO, 1.0)], 1),
    ],
)
def test_the_cause_is_the_first_that_is_no_consequence(failures: list[Failure], rank: int) -> None:
    assert cause(failures).rank == rank


def test_the_first_by_time_alone_would_be_wrong() -> None:
    """The broken twin: an echo often comes first."""
    failures = [failed(0, Origin.ECHO, 1.0), failed(1, Origin.RAISED, 2.0)]
    assert min(failures, key=lambda failure: failure.moment).rank != cause(failures).rank


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        (PeerLost("a worker left"), True),
        (ConnectionResetError("x"), True),
        (RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:123"), True),
        (RuntimeError("shapes differ"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_echoes_are_told_from_causes(error: Exception, echo: bool) -> None:
    assert is_echo(error) is echo


@pytest.mark.parametrize(
    ("exit_code", "stopped", "origin"),
    [
        (-signal.SIGKILL, False, Origin.KILLED),
        (-signal.SIGKILL, True, Origin.STOPPED),
        (-signal.SIGSEGV, False, Origin.KILLED),
        (-signal.SIGABRT, False, Origin.ENDED),
        (-signal.SIGTERM, True, Origin.STOPPED),
        (-signal.SIGTERM, False, Origin.KILLED),
        (3, False, Origin.ENDED),
    ],
)
def test_workers_that_left_no_word(exit_code: int, stopped: bool, origin: Origin) -> None:
    assert from_exit(0, exit_code, 0.0, stopped).origin is origin


def test_a_worker_that_was_asked_alone_to_end_is_the_cause_of_what_the_others_met() -> None:
    ended = from_exit(1, -signal.SIGTERM, 1.0, stopped=False)
    assert cause([failed(0, Origin.ECHO, 0.5), ended]).rank == 1
    assert "rank 1 failed: it ended with signal SIGTERM. It alone received a request to end" in str(ended)


def test_exit_codes_are_those_of_a_shell() -> None:
    assert failed(0, Origin.KILLED, 0.0, -9).shell_code == 137
    assert failed(0, Origin.ENDED, 0.0, 3).shell_code == 3
    assert failed(0, Origin.ENDED, 0.0, 0).shell_code == 1


def test_messages_name_rank_and_signal() -> None:
    assert str(from_exit(2, -9, 0.0, False)).startswith("rank 2 failed: it ended with signal SIGKILL")
    assert str(from_exit(2, -15, 0.0, True)) == "rank 2 was stopped (signal SIGTERM)"
    assert str(failed(1, Origin.RAISED, 0.0)) == "rank 1 failed: RAISED (exit code 1)"
    assert from_exit(0, -64, 0.0, False).ending in ("signal 64", "signal SIGRTMAX")
