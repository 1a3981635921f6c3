"""State transfer: a joiner begins from what a live peer showed, to the bit, or does not begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.pairwise_partners import start_of

from gossamer.algorithms.gossip import state_transfer
from gossamer.algorithms.gossip.partner import Partner, answering, initiate
from gossamer.algorithms.gossip.state_transfer import (
    STATE,
    PeerStatus,
    ReceivedState,
    checked,
    decode_status,
    receive_state,
    rejoin,
    with_checksum,
)
from gossamer.base.layout import FlatTensors
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import WORKER, Arrived, Await, Peer, PeerScript, Pull, Pulled, Reply
from gossamer.comm.simulation import simulate_peers
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.errors import MalformedError, PeerLost

LIVE, JOINER = Peer(WORKER, 0), Peer(WORKER, 1)
NUMBERS = torch.tensor([8.0, -4.0, 2.0], dtype=torch.float64)
COUNTS = torch.tensor([7, 9], dtype=torch.uint8)
Change = Callable[[Pulled], Pulled]


def unchanged(answer: Pulled) -> Pulled:
    return answer


def one_bit(answer: Pulled) -> Pulled:
    shown, *extra_state = answer.payload
    other = shown.clone()
    other.view(torch.uint8)[5] ^= 1
    return replace(answer, payload=(other, *extra_state))


def one_count(answer: Pulled) -> Pulled:
    return replace(answer, payload=(answer.payload[0], answer.payload[1] + 1))


def shorter(answer: Pulled) -> Pulled:
    return with_checksum(replace(answer, payload=(answer.payload[0][:2].clone(), *answer.payload[1:])))


def another_dtype(answer: Pulled) -> Pulled:
    return with_checksum(replace(answer, payload=(answer.payload[0].float(), *answer.payload[1:])))


def nothing(answer: Pulled) -> Pulled:
    return Pulled(version=answer.version)


def spoilt(answer: Pulled) -> Pulled:
    return with_checksum(replace(answer, payload=(answer.payload[0] * torch.inf, *answer.payload[1:])))


def alone(answer: Pulled) -> Pulled:
    return with_checksum(replace(answer, payload=answer.payload[:1]))


def joined(change: Change) -> tuple[Partner, Partner]:
    """A worker joins one that trains, whose answers are changed on their way, and they average once."""
    live = Partner(FlatTensors.pack({"weight": NUMBERS}), 0)
    live.extra_state = lambda: (COUNTS,)
    found: list[Partner] = []

    def answers() -> PeerScript:
        script = answering(live)
        op = next(script)
        while True:
            heard = yield Await()
            op = script.send(heard)
            while isinstance(op, Reply):
                asked = isinstance(heard, Arrived) and isinstance(heard.op, Pull) and heard.op.key == STATE
                if asked and isinstance(op.answer, Pulled):
                    op = replace(op, answer=change(op.answer))
                yield op
                op = script.send(None)

    def joins() -> PeerScript:
        start, counts = yield from receive_state(0, (torch.zeros_like(NUMBERS), torch.zeros_like(COUNTS)), 20.0)
        assert torch.equal(counts, COUNTS)
        found.append(Partner(FlatTensors.pack({"weight": start}), 1))
        live.drain(NUMBERS + 4)  # which went on meanwhile
        yield from initiate(found[0], 0, 0)

    net = VirtualNetwork(round_trip_seconds=0.1)
    simulate_peers({LIVE: answers, JOINER: joins}, net, 0, servers=(LIVE,)).result(JOINER)
    return live, found[0]


def test_a_rank_that_joins_begins_from_what_was_shown() -> None:
    live, new = joined(unchanged)
    assert torch.equal(live.shown, NUMBERS + 2)
    assert torch.equal(new.shown, NUMBERS + 2)


OTHERS = "this worker has"
HASH = "sent parameters of hash"
CHANGES = {one_bit: HASH, one_count: HASH, shorter: OTHERS, another_dtype: OTHERS, nothing: OTHERS, alone: OTHERS,
           spoilt: "not finite"}  # fmt: skip


@pytest.mark.parametrize(("change", "why"), CHANGES.items(), ids=lambda each: getattr(each, "__name__", ""))
def test_who_hears_something_else_does_not_begin(change: Change, why: str) -> None:
    with pytest.raises(MalformedError, match=why):
        joined(change)


def test_a_joiner_that_does_not_look_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def credulous(pulled: Pulled, peer: int, like: Payload) -> Payload:
        return pulled.payload[0], COUNTS

    monkeypatch.setattr(state_transfer, "checked", credulous)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_who_hears_something_else_does_not_begin(one_bit, HASH)


def test_other_bits_other_dtypes_other_hashes() -> None:
    tensors = [torch.zeros(4), torch.zeros(4, dtype=torch.int32), torch.zeros(5), -torch.zeros(4)]
    assert len({with_checksum(Pulled(version=0, payload=(each,))).about for each in tensors}) == 4
    assert with_checksum(Pulled(version=3)) == Pulled(version=3)
    kept = with_checksum(Pulled(version=7, payload=(NUMBERS,)))
    assert checked(kept, 0, (NUMBERS,)) == (NUMBERS,)
    two = [(NUMBERS, NUMBERS[:1]), (NUMBERS[:1], NUMBERS)]
    assert len({with_checksum(Pulled(version=0, payload=each)).about for each in two}) == 2


# -- State transfer to a restarted worker: whom it begins from, and when it gives up -----------------------------------


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


def test_a_rank_that_comes_back_after_the_end_takes_nothing_over() -> None:
    status = PeerStatus(incarnation=0, steps=9, done=True, stop=False, agreed=True, here=(0,))
    assert came_back(status.encoded()) == ReceivedState(0, status, ())


def test_who_finds_nothing_to_continue_from_reports_it() -> None:
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
