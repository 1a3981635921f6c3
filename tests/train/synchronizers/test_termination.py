"""Termination of gossip: what a worker said in one incarnation does not count for the next."""

from __future__ import annotations

import pytest
from support.pairwise_partners import start_of

from gossamer.algorithms.gossip.final_mean import FinalMean
from gossamer.algorithms.gossip.incarnation import with_incarnation
from gossamer.algorithms.gossip.pairwise import Partner
from gossamer.algorithms.gossip.state_transfer import STATUS, PeerStatus, decode_status, hash_of
from gossamer.base.layout import FlatTensors
from gossamer.base.peer_ops import WORKER, Arrived, Peer, Pull, Push, Stamp
from gossamer.errors import PeerLost
from gossamer.train.synchronizers.termination import TerminationProtocol


class Ageless(TerminationProtocol):
    """Takes what a worker said in one incarnation for what all of them said."""

    @property
    def _done_here(self) -> set[int]:
        return set(self._said["done"])


def check_who_is_done(rule: type[TerminationProtocol]) -> None:
    """Somebody who is done and comes back is not, until it says so again; what is late changes nothing."""
    one = rule(Partner(FlatTensors.pack({"weight": start_of(0)}), 0), 2)
    script = one.listen(lambda peer, where: places.append((peer, where)))
    places: list[tuple[Peer, str]] = []
    next(script)

    def said(key: str, incarnation: int, about: str = "") -> set[int]:
        push = Push(to=Peer(WORKER, 0), key=key, stamp=Stamp(1, with_incarnation(incarnation, 0)), about=about)
        script.send(Arrived(moment=0.0, token=1, sender=Peer(WORKER, 1), op=push))
        next(script)
        return one._done_here

    assert said("here", 0) == set()
    assert said("done", 0) == {1}
    assert said("here", 1, "[]") == set()
    assert said("done", 0) == set()
    assert said("done", 1) == {1}
    assert said("done", 0) == {1}
    assert places == [(Peer(WORKER, 1), "[]")]


def test_who_came_back_is_not_done() -> None:
    check_who_is_done(TerminationProtocol)
    with pytest.raises(AssertionError):
        check_who_is_done(Ageless)


def test_what_was_said_to_the_life_before_is_said_to_who_came_back() -> None:
    """That a worker is done, and that the run is asked to end."""
    old, new = (
        TerminationProtocol(Partner(FlatTensors.pack({"weight": start_of(0)}), rank, incarnation=rank), 2)
        for rank in (0, 1)
    )
    old._done, old.steps = True, 17
    old._say_that("stop", 1, 0)
    script = old.listen()
    next(script)
    greeting = new.say(0, "here")
    reply = script.send(Arrived(moment=0.0, token=1, sender=Peer(WORKER, 1), op=next(greeting)))
    assert not new.told_to_stop
    with pytest.raises(StopIteration):
        greeting.send(reply.answer)
    assert new.told_to_stop
    assert new._done_here == {0}
    next(script)
    op = Pull(of=Peer(WORKER, 0), key=STATUS)
    said = script.send(Arrived(moment=0.0, token=2, sender=Peer(WORKER, 1), op=op)).answer
    assert decode_status(said.about) == PeerStatus(
        incarnation=0, steps=17, done=True, stop=True, agreed=False, here=(1, 0)
    )


@pytest.mark.parametrize(
    ("claimed", "accepted", "world", "is_its"),
    [
        (None, 2, 3, True),
        (None, 1, 2, False),
        (None, 2, 4, False),
        (None, 3, 4, True),
        ("a", 1, 4, True),
        ("b", 4, 4, False),
    ],
)
def test_whose_mean_is_the_runs(claimed: str | None, accepted: int, world: int, is_its: bool) -> None:
    """The one that is entered; without a place for it, the one that more than half of all accepted."""
    partner = Partner(FlatTensors.pack({"weight": start_of(0)}), 0)
    one = TerminationProtocol(partner, world, lambda text: claimed)
    partner.mark_gone(1)
    if is_its:
        one._check_claimed("a", accepted)
    else:
        with pytest.raises(PeerLost, match="without a connection to workers 1"):
            one._check_claimed("a", accepted)


def test_a_worker_takes_one_mean_and_is_dismissed_with_no_other() -> None:
    one = TerminationProtocol(Partner(FlatTensors.pack({"weight": start_of(0)}), 0), 3)
    first, second = (FinalMean((start_of(rank),), 0.0).encoded() for rank in (1, 2))
    assert [one._accepts(mean) for mean in (first, second, first)] == [True, False, True]
    one._dismissed_with.add(hash_of(second))
    with pytest.raises(PeerLost):
        one._check_taken()
    one._dismissed_with.add(hash_of(first))
    one._check_taken()
