"""Who says that ranks have not come to gossamer.init(), and what."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.virtual_workers import notices

from gossamer.comm.environment.launcher_env import JobEnvironment
from gossamer.comm.environment.meeting import COMING, REACHING
from gossamer.comm.environment.meeting_place import NotAnnounced
from gossamer.comm.environment.rendezvous import JoinProgress


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


def test_nobody_is_named_where_nobody_is_missing_or_rank_0_says_it(said: list[str]) -> None:
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
def test_the_likely_cause_is_said(said: list[str], problem: OSError, cause: str) -> None:
    waited(1).for_rank_0(problem)
    assert "for rank 0 of 8 to reach gossamer.init()" in said[0]
    assert f"({problem})" in said[0]
    assert cause in said[0]
