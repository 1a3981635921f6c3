"""Message desk: every letter is answered once, whatever the network does, and a node that is gone is given up."""

from __future__ import annotations

import pytest
import torch

from gossamer.base.peer_ops import Arrived, Await, Peer, PeerLeft, PeerScript, Pull, Push, Receipt, Reply, Stamp
from gossamer.comm.simulation import simulate_peers
from gossamer.comm.simulation.faulty_network import Kill, Restart, VirtualNetwork
from gossamer.federated.flower.desk import ANSWER, LETTER, NOT_USED, MessageDesk, answer_letters
from gossamer.federated.messages import CLIENT, THE_SERVER

BAD = VirtualNetwork(round_trip_seconds=0.1, jitter_seconds=0.2, loss=0.2, duplicate=0.2, dead_after_seconds=1e9)


def listen(desk: MessageDesk) -> PeerScript:
    while True:
        yield from desk.react((yield Await()))


def exchanged(net: VirtualNetwork, seed: int, nodes: int = 3, letters: int = 4) -> tuple[MessageDesk, list[str]]:
    """Letters are all written before anybody asks. Also: what nodes were asked, in order."""
    desk, asked = MessageDesk(), []
    for node in range(nodes):
        for index in range(letters):
            desk.write(node, f"{node}.{index}", bytes([node, index]))
    desk.end()

    def answer(head: str, data: bytes) -> bytes:
        asked.append(head)
        return data * 2

    scripts = {THE_SERVER: lambda: listen(desk)}
    for node in range(nodes):
        scripts[Peer(CLIENT, node)] = lambda node=node: answer_letters(node, answer)
    simulate_peers(scripts, net, seed, checks=True)
    return desk, asked


@pytest.mark.parametrize("seed", range(20))
def test_every_letter_is_answered_once_on_a_bad_network(seed: int) -> None:
    desk, asked = exchanged(BAD, seed)
    assert desk.answers == {(node, index): bytes([node, index] * 2) for node in range(3) for index in range(4)}
    assert sorted(asked) == sorted(f"{node}.{index}" for node in range(3) for index in range(4))


def test_a_node_that_is_started_again_continues() -> None:
    faults = (Kill(Peer(CLIENT, 1), at=1.5), Restart(Peer(CLIENT, 1), at=2.0))
    net = VirtualNetwork(round_trip_seconds=1.0, dead_after_seconds=1e9, faults=faults)
    desk, asked = exchanged(net, 0)
    assert desk.answers == {(node, index): bytes([node, index] * 2) for node in range(3) for index in range(4)}
    assert len(asked) >= 12


def test_letters_of_a_node_that_is_gone_are_given_up() -> None:
    desk = MessageDesk()
    desk.react(arrived(1, Pull(of=THE_SERVER, key=LETTER)))
    assert desk.present == {1}
    number, said = desk.write(1, "head", b"data")
    assert [each.token for each in said] == [7]
    desk.react(PeerLeft(moment=0.0, peer=Peer(CLIENT, 1)))
    assert (desk.present, desk.answers) == (set(), {(1, number): None})
    (late,) = desk.react(arrived(1, pushed(1, number)))
    assert desk.answers == {(1, number): None}
    assert isinstance(late.answer, Receipt)
    desk.write(1, "head", b"while it is gone")
    assert desk.answers[1, 1] is None
    desk.react(arrived(1, Pull(of=THE_SERVER, key=LETTER)))
    assert desk.write(1, "head", b"when it is back")[1]
    assert (1, 2) not in desk.answers


def test_answers_that_nobody_waits_for_are_not_kept() -> None:
    desk = MessageDesk()
    for head in "abc":
        desk.write(1, head, b"")
    desk.react(arrived(1, pushed(1, 0)))
    desk.forget(1, 0)
    desk.forget(1, 1)
    desk.react(arrived(1, pushed(1, 1)))
    assert desk.answers == {}
    desk.react(arrived(1, pushed(1, 2)))
    assert list(desk.answers) == [(1, 2)]


def arrived(node: int, op: Pull | Push, kind: str = CLIENT) -> Arrived:
    return Arrived(moment=0.0, token=7, sender=Peer(kind, node), op=op)


def pushed(node: int, number: int, key: str = ANSWER, dtype: torch.dtype = torch.uint8) -> Push:
    return Push(to=THE_SERVER, key=key, stamp=Stamp(node, number), payload=(torch.ones(2, dtype=dtype),))


@pytest.mark.parametrize(
    "event",
    [
        arrived(1, pushed(2, 0)),  # in another's name
        arrived(1, pushed(1, 1)),  # before the first
        arrived(1, pushed(1, 2)),  # nobody wrote it
        arrived(1, pushed(1, -1)),
        arrived(1, pushed(1, 0, key="other")),
        arrived(1, pushed(1, 0, dtype=torch.float32)),
        arrived(1, pushed(1, 0), kind="worker"),
        arrived(1, Pull(of=THE_SERVER, key="other")),
    ],
)
def test_what_was_not_asked_is_not_used(event: Arrived) -> None:
    desk = MessageDesk()
    desk.write(1, "a", b"")
    desk.write(1, "b", b"")
    (said,) = desk.react(event)
    assert said == Reply(token=7, answer=Receipt(version=NOT_USED))
    assert desk.answers == {}
