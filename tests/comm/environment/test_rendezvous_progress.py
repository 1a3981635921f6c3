"""Who says that ranks have not come to gossamer.init(), and what."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from support.joining import attends, in_threads, job
from support.virtual_workers import notices

from gossamer import events
from gossamer.comm.environment import join, leave, rendezvous, wait_progress
from gossamer.comm.environment.launcher_env import JobEnvironment
from gossamer.comm.environment.meeting import COMING, REACHING
from gossamer.comm.environment.meeting_place import NotAnnounced
from gossamer.comm.environment.rendezvous import JoinProgress
from gossamer.errors import ConnectError


@pytest.fixture
def said() -> Iterator[list[str]]:
    with notices() as heard:
        yield heard


def waited(rank: int, server: Any = None, **place: int) -> JoinProgress:
    """The progress of a rank that has waited for eleven seconds."""
    moments = iter([0.0])
    job = JobEnvironment(rank=rank, world=8, **{"local_rank": rank, "local_world": 8} | place)
    return JoinProgress(job, 1800.0, server, clock=lambda: next(moments, 11.0))


def meeting(**missing: list[int]) -> Any:
    return SimpleNamespace(missing=lambda topic: missing[topic])


def test_rank_0_names_those_that_have_not_come(said: list[str]) -> None:
    progress = waited(0, meeting(coming=[3, 7], reaching=[]))
    progress.for_all(COMING)()
    progress.end()
    assert said[0].startswith("rank 0 has waited 11 s for ranks 3 and 7 of 8 to reach gossamer.init()")
    assert said[1] == "rank 0 continues: all reached gossamer.init() after 11 s"


def test_no_rank_is_named_where_nobody_is_missing_or_rank_0_says_it(said: list[str]) -> None:
    waited(0, meeting(reaching=[])).for_all(REACHING)()
    waited(1).for_all(COMING)()
    assert said == []


@pytest.mark.parametrize(
    ("rank", "place", "says"),
    [
        (1, {}, True),  # beside rank 0
        (2, {}, False),
        (4, {"local_rank": 0, "local_world": 4}, True),  # the first of another machine
        (5, {"local_rank": 1, "local_world": 4}, False),
    ],
)
def test_one_rank_of_each_machine_says_that_rank_0_is_missing(
    said: list[str], rank: int, place: dict[str, int], says: bool
) -> None:
    waited(rank, **place).for_rank_0(ConnectionRefusedError(111, "Connection refused"))
    assert len(said) == says


@pytest.mark.parametrize(
    ("problem", "cause"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "rank 0 was not started, is still importing or has failed"),
        (NotAnnounced("it has not joined"), "Rank 0 is still importing"),
        (TimeoutError("timed out"), "its machine is off or booting, or a firewall drops"),
        (socket.gaierror(-2, "Name or service not known"), "cannot be resolved"),
    ],
)
def test_the_likely_cause_is_reported(said: list[str], problem: OSError, cause: str) -> None:
    waited(1).for_rank_0(problem)
    assert "for rank 0 of 8 to reach gossamer.init()" in said[0]
    assert f"({problem})" in said[0]
    assert cause in said[0]


# -- Joining a job whose ranks come minutes apart: what is said, and when it is given up -------------------------------


@pytest.fixture
def waiting_notices(monkeypatch):
    """What is said of a wait, soon, and an event that is set by then."""
    monkeypatch.setattr(wait_progress, "NOTICE_SECONDS", 0.05)
    said, missed = [], threading.Event()

    def hear(event):
        if isinstance(event, events.Noticed):
            said.append(event.message)
            missed.set()

    end = events.subscribe(hear)
    yield said, missed
    end()


@pytest.mark.usefixtures("environ")
@pytest.mark.parametrize(
    ("early", "late", "cause"),
    [(1, 0, "Nothing listens there: rank 0 was not started"), (0, 1, "Check its output")],
)
def test_a_rank_that_comes_late_is_waited_for_aloud(port, formed, waiting_notices, early, late, cause):
    said, missed = waiting_notices

    def comes_late():
        assert missed.wait(10)
        return join(job(late, port), 60.0)

    assert in_threads(lambda: join(job(early, port), 60.0), comes_late) == ["gloo", "gloo"]
    assert f"for rank {late} of 2 to reach gossamer.init(), and waits for 60 s at most" in said[0]
    assert cause in said[0]
    assert any(each.startswith(f"rank {early} continues: all reached gossamer.init()") for each in said)


@pytest.mark.usefixtures("environ")
def test_what_can_be_no_address_is_refused_at_once(port):
    with pytest.raises(ConnectError, match="is neither an IP address nor a host name"):
        join(dataclasses.replace(job(1, port), master_address="10.0.0.256"))


def rank_1(port, leaves):
    """Another's member, which stays until it is told to leave."""
    with contextlib.closing(attends(port, 1)) as member:
        member.everyone("reaching", 5.0, "")
        member.everyone("standing", 5.0, "")
        assert leaves.wait(10)


@pytest.mark.usefixtures("environ")
def test_a_peer_that_leaves_once_the_group_stands_is_known_to_those_that_ask(port, formed):
    leaves, found = threading.Event(), []

    def rank_0():
        join(job(0, port), 5.0)
        found.append(rendezvous.gone())
        leaves.set()
        while not rendezvous.gone():
            pass
        found.append(rendezvous.gone())
        leave()
        found.append(rendezvous.gone())

    in_threads(rank_0, lambda: rank_1(port, leaves))
    assert found == ["", "rank 1 (w1)", ""]


@pytest.mark.usefixtures("environ")
@pytest.mark.parametrize(("text", "timeout"), [("", None), ("2700", timedelta(minutes=45))])
def test_the_group_waits_as_long_as_was_asked(port, environ, monkeypatch, formed, text, timeout):
    given = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, timeout, **__: given.append(timeout))
    environ["GOSSAMER_TIMEOUT"] = text
    assert in_threads(*(lambda rank=rank: join(job(rank, port)) for rank in (0, 1))) == ["gloo", "gloo"]
    assert given == [timeout] * 2


@pytest.mark.usefixtures("environ")
def test_the_variable_reports_how_long_all_are_waited_for(port, environ):
    environ["GOSSAMER_TIMEOUT"] = "0.2"
    with pytest.raises(ConnectError, match=r"rank 1 of 2 did not join within 0\.2 s.*GOSSAMER_TIMEOUT=7200"):
        join(job(0, port))
    environ["GOSSAMER_TIMEOUT"] = "soon"
    with pytest.raises(ValueError, match="GOSSAMER_TIMEOUT=soon"):
        join(job(0, port))
