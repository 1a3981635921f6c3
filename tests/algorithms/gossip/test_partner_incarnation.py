"""Incarnation numbers: steps of different incarnations never meet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from support.fault_seeds import block_name, blocks, replayed
from support.machine_faults import CALLER, TRAINER, of_machines
from support.pairwise_partners import UNIT, start_of
from torch import Tensor

from gossamer.algorithms.gossip.partner import (
    STEPS_PER_INCARNATION,
    Partner,
    decode_incarnation,
    encode_incarnation,
    incarnation_of,
    initiate,
    with_incarnation,
)
from gossamer.algorithms.gossip.state_transfer import ReceivedState, rejoin
from gossamer.algorithms.topologies import Complete
from gossamer.base import rng
from gossamer.base.layout import FlatTensors
from gossamer.base.peer_ops import WORKER, Peer, PeerScript, Pulled, Push, Receipt, Stamp
from gossamer.comm.simulation import Trace, compute, simulate_peers
from gossamer.comm.simulation.faulty_network import Kill, Restart, VirtualNetwork
from gossamer.errors import PeerLost
from gossamer.train.synchronizers.termination import TerminationProtocol


def test_steps_of_lives_never_meet() -> None:
    assert with_incarnation(0, 7) == 7
    assert with_incarnation(3, 7) == 3 * STEPS_PER_INCARNATION + 7
    assert [
        incarnation_of(with_incarnation(incarnation, step))
        for incarnation in (0, 1, 9)
        for step in (0, STEPS_PER_INCARNATION - 1)
    ] == [0, 0, 1, 1, 9, 9]
    assert [decode_incarnation(encode_incarnation(incarnation)) for incarnation in (0, 1, 12)] == [0, 1, 12]
    assert [decode_incarnation(text) for text in ("x", "-1", "1" * 10, "\u0661")] == [-1] * 4


# -- which state they begin from, and which stale messages never count -------------------------------------------------


WORLD = 3


# -- what happens is written down ----------------------------------------------------------------------------------


class Move(NamedTuple):
    """What one end of an exchange moved by, and in which of its incarnations."""

    rank: int
    incarnation: int
    difference: Tensor


@dataclass
class Book:
    """The record of all exchanges."""

    moves: dict[Stamp, list[Move]] = field(default_factory=lambda: defaultdict(list))  # by the exchange's stamp
    asked: dict[Stamp, tuple[int, int]] = field(default_factory=dict)  # the peer meant, and its incarnation
    shown: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # to joiners, by rank


class Noted(Partner):
    """Writes down what it does."""

    book: Book
    under = Stamp(0, 0)

    def ask(self, peer: int, step: int, within_seconds: float | None = None) -> Push:
        push = super().ask(peer, step, within_seconds)
        self.book.asked[push.stamp] = peer, decode_incarnation(push.about)
        return push

    def answer(self, stamp: Stamp, payload: tuple[Tensor, ...]) -> Receipt:
        self.under = stamp
        return super().answer(stamp, payload)

    def land(self, push: Push, receipt: Receipt) -> bool:
        self.under = push.stamp
        return super().land(push, receipt)

    def snapshot(self, known: int) -> Pulled:
        self.book.shown[self.rank].append(self.shown)
        return super().snapshot(known)

    def _move(self, theirs: Tensor, sent: Tensor) -> None:
        before = self.shown
        super()._move(theirs, sent)
        self.book.moves[self.under].append(Move(self.rank, self.incarnation, self.shown - before))


# -- rules that are wrong ------------------------------------------------------------------------------------------


class Reuses(Noted):
    """Numbers its steps in each incarnation as in the first."""

    def ask(self, peer: int, step: int, within_seconds: float | None = None) -> Push:
        incarnation, self.incarnation = self.incarnation, 0
        try:
            return super().ask(peer, step, within_seconds)
        finally:
            self.incarnation = incarnation


class TakesAll(Noted):
    """Takes part in what was meant for another incarnation."""

    def receive(self, push: Push) -> Receipt:
        return self.answer(push.stamp, push.payload)


class Loyal(Noted):
    """Goes on with what it had begun with the one before."""

    def _abandon(self, peer: int) -> bool:
        return False


class OldWords(Noted):
    """Listens to what a worker said in the incarnation before."""

    def answer(self, stamp: Stamp, payload: tuple[Tensor, ...]) -> Receipt:
        incarnations, self._incarnations = self._incarnations, {}
        try:
            return super().answer(stamp, payload)
        finally:
            self._incarnations = {
                peer: max(self._incarnations.get(peer, 0), incarnations.get(peer, 0))
                for peer in {*self._incarnations, *incarnations}
            }


def from_its_own(found: ReceivedState, rank: int) -> Tensor:
    """A worker that begins as at the start of the run."""
    return start_of(rank)


def as_found(found: ReceivedState, rank: int) -> Tensor:
    return found.state[0]


# -- machines ------------------------------------------------------------------------------------------------------


class Machine:
    """A worker, its training thread and its exchanges. A kill takes all it has, and it begins another incarnation."""

    def __init__(self, rank: int, world: int, seed: int, rule: type[Noted], book: Book, begins: Any) -> None:
        self.rank, self.world, self.seed, self.rule, self.book, self.begins = rank, world, seed, rule, book, begins
        self.incarnation, self.awake, self.trained = -1, False, 0
        self.begun: list[tuple[int, Tensor]] = []
        self.partner: Noted
        self.termination: TerminationProtocol

    def live(self) -> PeerScript:
        self.incarnation += 1
        try:
            if self.incarnation:
                others = [peer for peer in range(self.world) if peer != self.rank]
                found: ReceivedState = yield from rejoin(others, (torch.zeros_like(start_of(0)),))
                self.trained = found.status.steps
                self.begin(self.begins(found, self.rank))
                self.begun.append((found.peer, self.start))
            else:
                self.begin(start_of(self.rank))
            yield from self.termination.listen()
        finally:
            self.awake = False

    def begin(self, start: Tensor) -> None:
        self.parameters, self.start, self.given = start.clone(), start, start.clone()
        one = self.rule(FlatTensors.pack({"weight": start}), self.rank, seed=self.seed, incarnation=self.incarnation)
        one.book = self.book
        if self.incarnation:
            one.mark_gone(*(peer for peer in range(self.world) if peer != self.rank))
        self.termination, self.partner, self.awake = TerminationProtocol(one, self.world), one, True

    def born(self) -> PeerScript:
        while not self.awake:
            yield from compute(0.05)
        return self.partner

    def train(self, steps: int, moves: bool) -> PeerScript:
        one: Noted = yield from self.born()
        draw = rng.generator("gradients", self.seed, self.rank, self.incarnation)
        for _ in range(steps):
            yield from compute(0.7 + 0.2 * self.rank)
            gradient = UNIT * torch.randint(-8, 8, (2,), generator=draw).double() * moves
            self.parameters += gradient
            self.given += gradient
            self.trained += 1
            self.termination.steps = self.trained
            one.drain(self.parameters)

    def call(self, exchanges: int, patience_seconds: float) -> PeerScript:
        one: Noted = yield from self.born()
        asked = 0
        while asked < exchanges or one.open:
            yield from compute(0.7 + 0.2 * self.rank)
            asked += 1
            peer = one.neighbor(Complete(), self.world, asked)
            if peer is not None:
                with suppress(PeerLost):
                    yield from initiate(one, peer, asked, patience_seconds)


def train(
    seed: int,
    net: VirtualNetwork,
    world: int = WORLD,
    steps: int = 4,
    rule: type[Noted] = Noted,
    begins: Any = as_found,
    moves: bool = True,
    keep: bool = False,
) -> tuple[list[Machine], Book, Trace]:
    """Machines train and average, some are lost and come back. net: its faults are of workers."""
    book = Book()
    machines = [Machine(rank, world, seed, rule, book, begins) for rank in range(world)]
    patience_seconds = 2.0 + 2 * net.round_trip_seconds
    scripts: dict[Peer, Callable[[], PeerScript]] = {}
    for rank, each in enumerate(machines):
        scripts[Peer(WORKER, rank)] = each.live
        scripts[Peer(TRAINER, rank)] = partial(each.train, steps, moves)
        scripts[Peer(CALLER, rank)] = partial(each.call, steps, patience_seconds)
    net = of_machines(net)
    answerers = [Peer(WORKER, rank) for rank in range(world)]
    trace = simulate_peers(scripts, net, seed, servers=answerers, checks=True, keep=keep, most_seconds=500.0)
    return machines, book, trace


# -- what is checked -----------------------------------------------------------------------------------------------


def check_exchanges(machines: Sequence[Machine], book: Book) -> None:
    """Both ends of an exchange move by as much against each other, each once, in the incarnations it was begun in;
    where only one did, the other's incarnation is over."""
    for stamp, moves in book.moves.items():
        peer, incarnation = book.asked[stamp]
        ends = {(stamp.worker, incarnation_of(stamp.step)), (peer, incarnation)}
        moved = [(each.rank, each.incarnation) for each in moves]
        assert len(set(moved)) == len(moved), f"{stamp} moved somebody twice"
        assert set(moved) <= ends, f"{stamp}, which was begun by {ends}, moved {moved}"
        if len(moved) == 2:
            assert not (moves[0].difference + moves[1].difference).any(), f"{stamp} moved the sum"
        else:
            assert any(machines[rank].incarnation != incarnation for rank, incarnation in ends), (
                f"{stamp} moved one of two that live"
            )


def check_accounts(machines: Sequence[Machine], book: Book) -> None:
    """What a worker has is what its incarnation began with, its gradients, and what its exchanges moved."""
    for each in machines:
        if each.partner.incarnation != each.incarnation:  # all was over before it had found anybody
            continue
        mine = [
            m.difference
            for ms in book.moves.values()
            for m in ms
            if (m.rank, m.incarnation) == (each.rank, each.incarnation)
        ]
        each.partner.drain(each.parameters)
        assert torch.equal(each.parameters, each.given + sum(mine, torch.zeros(2).double()))
        assert each.partner.open == ()


def check_begins(machines: Sequence[Machine], book: Book) -> None:
    """Whoever came back began from what somebody showed, to the bit."""
    for each in machines:
        for peer, start in each.begun:
            assert any(torch.equal(start, shown) for shown in book.shown[peer]), "it begins from what nobody showed"


def check_counted(machines: Sequence[Machine], book: Book) -> None:
    """What a worker began with an incarnation that has ended, and what that took along, it has counted."""
    for each in machines:
        mine = [
            ms
            for stamp, ms in book.moves.items()
            if (stamp.worker, incarnation_of(stamp.step)) == (each.rank, each.incarnation)
        ]
        half_made = sum(each.rank not in [move.rank for move in moves] for moves in mine)
        assert half_made <= each.partner.abandoned, "more is missing than was counted"


def check(machines: Sequence[Machine], book: Book) -> None:
    check_begins(machines, book)
    check_exchanges(machines, book)
    check_accounts(machines, book)
    check_counted(machines, book)


NET = VirtualNetwork(round_trip_seconds=0.5, jitter_seconds=0.05, dead_after_seconds=2.0, resend_seconds=0.3)
SOON, LATE = 0.4, 3.0  # back before the others count it as gone, and after


def points() -> list[float]:
    """Just after each moment of a run without faults."""
    _, _, trace = train(0, NET, keep=True)
    moments = sorted({moment for moment, _ in trace.events})
    return [moment + 1e-6 for moment in moments]


def lost(at: float, away_seconds: float, rank: int = 1) -> VirtualNetwork:
    peer = Peer(WORKER, rank)
    return replace(NET, faults=(Kill(peer, at), Restart(peer, at + away_seconds)))


def check_every_point(away_seconds: float, **options: Any) -> None:
    moments = points()
    back = averaged = 0
    for at in moments:
        machines, book, _ = train(0, lost(at, away_seconds), **options)
        check(machines, book)
        back += bool(machines[1].begun)
        averaged += any(len(ms) == 2 and (1, 1) in [(m.rank, m.incarnation) for m in ms] for ms in book.moves.values())
    assert len(moments) > 30
    assert back > len(moments) * 0.8
    assert averaged == back, "nobody averages with who came back"


@pytest.mark.parametrize("away_seconds", [SOON, LATE])
def test_promise_3_at_every_point_of_a_run_a_worker_may_be_lost_and_come_back(away_seconds: float) -> None:
    check_every_point(away_seconds)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"begins": from_its_own}, "what nobody showed"),
        ({"rule": Reuses}, "which was begun by|moved the sum|moved one of two"),
        ({"rule": TakesAll}, "which was begun by|moved somebody twice"),
        ({"rule": Loyal}, "more is missing"),
        ({"rule": OldWords}, "which was begun by|moved one of two"),
    ],
    ids=["begins from its own", "reuses stamps", "takes all", "loyal", "old words"],
)
def test_a_mutant_that_takes_one_life_for_another_is_found(broken: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_every_point(SOON, **broken)


def bad_network(seed: int) -> VirtualNetwork:
    """Workers 1 and 3 of four may be killed, also while they come back; somebody is always left."""
    peers = [Peer(WORKER, rank) for rank in range(4)]
    return VirtualNetwork.random(seed, peers, horizon_seconds=8.0, mortal=peers[1::2])


@pytest.mark.parametrize("block", blocks(75), ids=block_name)
def test_lives_are_kept_apart_on_bad_networks(block: range) -> None:
    back = 0
    for seed in block:
        with replayed(seed, "lives_are_kept_apart"):
            machines, book, _ = train(seed, bad_network(seed), world=4, steps=6)
            check(machines, book)
        back += sum(len(each.begun) for each in machines)
    assert back >= len(block) // 4


@pytest.mark.parametrize("rule", [Reuses, TakesAll, Loyal])
def test_bad_networks_find_who_takes_one_life_for_another(rule: type[Noted]) -> None:
    with pytest.raises(AssertionError):
        [check(*train(seed, bad_network(seed), world=4, steps=6, rule=rule)[:2]) for seed in range(200)]


def test_with_who_came_back_workers_agree_again() -> None:
    """Where nobody trains, all end at one mean: what the lost one had is missing from it, and somebody's is double."""
    machines, _, _ = train(1, lost(1.0, LATE), steps=60, moves=False)
    ends = torch.stack([each.partner.shown for each in machines])
    assert machines[1].incarnation == 1
    assert float((ends - ends.mean(0)).norm()) < 1e-3 * float((start_of(2) - start_of(0)).norm())
