"""Coming to a meeting that is not there yet, in injected time."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from math import inf

import pytest

from gossamer.comm.environment import meeting_member
from gossamer.comm.environment.meeting import COMING, Hello, RunIdentity
from gossamer.comm.environment.meeting_member import Unreachable, attend
from gossamer.comm.environment.meeting_server import MeetingServer

OURS = RunIdentity(run="a run", world=2)
ME = Hello(run="a run", world=2, rank=1, who="w1")


class Time:
    """The module `time`, in which it is later after each sleep and at once."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(meeting_member, "time", time)
    return time


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    with contextlib.closing(MeetingServer(listener, OURS)):
        yield listener.getsockname()


@pytest.mark.parametrize("seconds", [1800.0, inf])
def test_a_meeting_that_begins_minutes_later_is_found_and_rarely_asked_for(
    time: Time, address: tuple[str, int], seconds: float
) -> None:
    problems: list[OSError] = []

    def locate() -> tuple[str, int]:
        if time.now < 1500:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "not yet")
        return address

    with contextlib.closing(attend(locate, OURS, ME, seconds, problems.append)):
        pass
    assert len(problems) == len(time.slept) < 3100
    assert time.slept[0] < 0.05
    assert max(time.slept) == meeting_member.LONGEST_POLL_SECONDS
    assert time.now < 1501


def test_a_meeting_that_never_begins_is_waited_for_and_not_longer(time: Time) -> None:
    def locate() -> tuple[str, int]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name, for now")

    with pytest.raises(Unreachable, match="no such name"):
        attend(locate, OURS, ME, 1800.0)
    assert 1799 < time.now < 1801


def test_what_this_machine_refuses_is_waited_for_no_moment(time: Time) -> None:
    def locate() -> tuple[str, int]:
        raise PermissionError(errno.EPERM, "not from here")

    with pytest.raises(Unreachable, match="not from here"):
        attend(locate, OURS, ME, 1800.0)
    assert time.slept == []


def test_one_attempt_lasts_seconds_however_long_the_wait(
    time: Time, address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is off answers no packet, and somebody has to say so."""
    lasted: list[float] = []

    def connect(address: tuple[str, int], seconds: float) -> socket.socket:
        lasted.append(seconds)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(Unreachable):
        attend(lambda: address, OURS, ME, 30.0)
    assert max(lasted) == meeting_member.DIAL_SECONDS


def test_a_peer_that_waits_for_the_others_looks_around_meanwhile(address: tuple[str, int]) -> None:
    """As Ctrl-C would end it, amid a wait for ever."""
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 2:
            raise KeyboardInterrupt

    with contextlib.closing(attend(lambda: address, OURS, ME, 5.0)) as member, pytest.raises(KeyboardInterrupt):
        member.everyone(COMING, inf, look=look)
