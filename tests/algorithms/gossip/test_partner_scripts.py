"""Scripts of pairwise gossip: how a worker answers peers, and what becomes of an exchange whose end is lost."""

from __future__ import annotations

import pytest
import torch
from support.pairwise_partners import exchange, partner

from gossamer.algorithms.gossip.partner import answering, initiate
from gossamer.algorithms.topologies import Ring
from gossamer.base.peer_ops import WORKER, Arrived, Await, Peer, PeerJoined, PeerLeft, Pull, Pulled, Push, Reply, Stamp
from gossamer.errors import PeerLost


def test_answering_hears_who_comes_and_goes() -> None:
    one = partner(0, [0.0])
    script = answering(one)
    assert next(script) == Await()
    assert script.send(PeerLeft(moment=0.0, peer=Peer(WORKER, 1))) == Await()
    script.send(PeerLeft(moment=0.0, peer=Peer("trainer", 4)))
    assert {one.neighbor(Ring(), 5, step) for step in range(50)} == {4}
    script.send(PeerJoined(moment=0.0, peer=Peer(WORKER, 1)))
    assert {one.neighbor(Ring(), 5, step) for step in range(50)} == {1, 4}


def test_answering_shows_the_parameters_to_who_joins() -> None:
    one = partner(0, [3.0])
    script = answering(one)
    next(script)

    def pull(known: int) -> Pulled:
        asker, op = Peer(WORKER, 1), Pull(of=Peer(WORKER, 0), key="average", known=known)
        said = script.send(Arrived(moment=0.0, token=known, sender=asker, op=op))
        assert isinstance(said, Reply)
        assert isinstance(said.answer, Pulled)
        next(script)
        return said.answer

    assert pull(-1) == Pulled(version=0, payload=(one.shown,))
    assert pull(0) == Pulled(version=0)


def test_answering_takes_part_in_averages_that_the_sender_asks_for_itself() -> None:
    one = partner(0, [3.0])
    script = answering(one)
    next(script)
    for key, sender, version in (("gradient", 1, -1), ("average", 2, -1), ("average", 1, 1)):
        op = Push(to=Peer(WORKER, 0), key=key, stamp=Stamp(1, 0), payload=(torch.zeros(1).double(),))
        said = script.send(Arrived(moment=0.0, token=0, sender=Peer(WORKER, sender), op=op))
        assert isinstance(said, Reply)
        assert said.answer.version == version
        next(script)
    assert one.shown.item() == 1.5


def test_an_exchange_whose_partner_is_lost_stays_open_and_is_repaired() -> None:
    one, other = partner(0, [0.0]), partner(1, [8.0])
    script = initiate(one, 1, 0)
    push = next(script)
    assert isinstance(push, Push)
    other.answer(push.stamp, push.payload)  # it moved, and its receipt is lost
    with pytest.raises(PeerLost):
        script.throw(PeerLost("gone"))
    assert one.open == (1,)
    assert exchange(one, other, 1)
    assert (one.shown.item(), other.shown.item()) == (4.0, 4.0)
