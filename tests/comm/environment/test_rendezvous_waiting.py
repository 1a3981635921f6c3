"""Joining a job whose ranks come minutes apart: what is said, and when it is given up."""

import contextlib
import dataclasses
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.joining import attends, in_threads, job

from gossamer import events
from gossamer.comm.environment import join, leave, rendezvous, wait_progress
from gossamer.errors import ConnectError

pytestmark = pytest.mark.usefixtures("environ")


@pytest.fixture
def notices(monkeypatch):
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


@pytest.mark.parametrize(
    ("early", "late", "cause"),
    [(1, 0, "Nothing listens there: rank 0 was not started"), (0, 1, "Check its output")],
)
def test_a_rank_that_comes_late_is_waited_for_aloud(port, formed, notices, early, late, cause):
    said, missed = notices

    def comes_late():
        assert missed.wait(10)
        return join(job(late, port), 60.0)

    assert in_threads(lambda: join(job(early, port), 60.0), comes_late) == ["gloo", "gloo"]
    assert f"for rank {late} of 2 to reach gossamer.init(), and waits for 60 s at most" in said[0]
    assert cause in said[0]
    assert any(each.startswith(f"rank {early} continues: all reached gossamer.init()") for each in said)


def test_what_can_be_no_address_is_refused_at_once(port):
    with pytest.raises(ConnectError, match="is neither an IP address nor a host name"):
        join(dataclasses.replace(job(1, port), master_address="10.0.0.256"))


def rank_1(port, leaves):
    """Another's member, which stays until it is told to leave."""
    with contextlib.closing(attends(port, 1)) as member:
        member.everyone("reaching", 5.0, "")
        member.everyone("standing", 5.0, "")
        assert leaves.wait(10)


def test_who_leaves_once_the_group_stands_is_known_to_those_that_ask(port, formed):
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


@pytest.mark.parametrize(("text", "timeout"), [("", None), ("2700", timedelta(minutes=45))])
def test_the_group_waits_as_long_as_was_asked(port, environ, monkeypatch, formed, text, timeout):
    given = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, timeout, **__: given.append(timeout))
    environ["GOSSAMER_TIMEOUT"] = text
    assert in_threads(*(lambda rank=rank: join(job(rank, port)) for rank in (0, 1))) == ["gloo", "gloo"]
    assert given == [timeout] * 2


def test_the_variable_says_how_long_all_are_waited_for(port, environ):
    environ["GOSSAMER_TIMEOUT"] = "0.2"
    with pytest.raises(ConnectError, match=r"rank 1 of 2 did not join within 0\.2 s.*GOSSAMER_TIMEOUT=7200"):
        join(job(0, port))
    environ["GOSSAMER_TIMEOUT"] = "soon"
    with pytest.raises(ValueError, match="GOSSAMER_TIMEOUT=soon"):
        join(job(0, port))
