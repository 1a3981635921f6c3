"""State transfer to a restarted worker: whom it begins from, and when it gives up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.pairwise_partners import start_of

from gossamer.algorithms.gossip.state_transfer import PeerStatus, ReceivedState, decode_status, rejoin
from gossamer.base.peer_ops import WORKER, Arrived, Await, Peer, PeerScript, Pulled, Reply
from gossamer.comm.simulation import simulate_peers
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.errors import MalformedError, PeerLost


def test_a_roll_is_read_as_it_was_written() -> None:
    status = PeerStatus(incarnation=2, steps=40, done=True, stop=False, agreed=False, here=(0, 3))
    assert decode_status(status.encoded()) == status
    for text in ("", "{}", "[1, 2]", "[0, 0, false, false, false, 3]", '[0, "x", false, false, false, []]'):
        with pytest.raises(MalformedError, match="status"):
            decode_status(text)


def answers(status: str) -> PeerScript:
    while True:
        heard = yield Await()
        if isinstance(heard, Arrived):
            yield Reply(token=heard.token, answer=Pulled(version=0, about=status))


def came_back(status: str) -> ReceivedState:
    me, other = Peer(WORKER, 1), Peer(WORKER, 0)
    scripts = {me: lambda: rejoin([0], (start_of(0),)), other: lambda: answers(status)}
    found: ReceivedState = simulate_peers(scripts, VirtualNetwork(), 0, servers=(other,)).result(me)
    return found


def test_who_comes_back_after_the_end_takes_nothing_over() -> None:
    status = PeerStatus(incarnation=0, steps=9, done=True, stop=False, agreed=True, here=(0,))
    assert came_back(status.encoded()) == ReceivedState(0, status, ())


def test_who_finds_nothing_to_go_on_from_says_so() -> None:
    for status in ("nonsense", PeerStatus(0, 0, False, False, False, (0,)).encoded()):
        with pytest.raises(PeerLost, match=r"no state .* from workers 0 .*restart"):
            came_back(status)


def test_nobody_waits_for_workers_that_have_come_to_the_end() -> None:
    """Whoever comes back a moment too late hears of it after the first that does not answer, not after a minute."""
    assert words_to_nobody(lambda: True) == 1
    assert words_to_nobody(lambda: False) == 20


def words_to_nobody(is_over: Callable[[], bool]) -> int:
    """How many are said before a worker that nobody answers gives up."""
    script = rejoin([0, 2], (start_of(0),), is_over)
    next(script)
    for count in range(1, 100):
        try:
            script.throw(PeerLost("nobody answers"))
        except PeerLost:
            return count
    raise AssertionError("it never gives up")
