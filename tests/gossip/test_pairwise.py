"""Pairwise gossip: what is conserved, under any interleaving, and how fast workers agree."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import sqrt
from typing import Any

import pytest
import torch
from support.fault_seeds import block_name, blocks, replayed
from support.machines import CALLER, TRAINER, of_machines
from torch import Tensor

from gossamer.compressors import Compressor, Dense, Feedback, OneBit, PowerSGD, RandomK, Route, TernGrad, TopK
from gossamer.compressors.int8 import Int8
from gossamer.compressors.qsgd import QSGD
from gossamer.core import rng
from gossamer.core.layout import FlatTensors
from gossamer.core.ops import payload_bytes
from gossamer.core.peer_ops import (
    WORKER,
    Arrived,
    Await,
    Elapsed,
    Peer,
    PeerJoined,
    PeerLeft,
    PeerScript,
    Pull,
    Pulled,
    Push,
    Receipt,
    Reply,
    Stamp,
)
from gossamer.errors import MalformedError, PeerLost, RecipeError
from gossamer.gossip.pairwise import Partner
from gossamer.gossip.pairwise_scripts import answering, initiate
from gossamer.simulation import Trace, compute, simulate_peers
from gossamer.simulation.faulty_network import VirtualNetwork
from gossamer.topologies import Complete, Ring, Topology

UNIT = 2**20  # whole multiples of it may be halved dozens of times, and their sums stay exact
SCHEDULES = 10_000


def partner(rank: int, values: Sequence[float] | Tensor, rule: type[Partner] = Partner, **options: Any) -> Partner:
    flat = torch.as_tensor(values, dtype=torch.float64)
    return rule(FlatTensors.pack({"weight": flat}), rank, **options)


def exchange(asks: Partner, answers: Partner, step: int) -> bool:
    push = asks.ask(answers.rank, step)
    return asks.land(push, answers.answer(push.stamp, push.payload))


# -- rules that are wrong --------------------------------------------------------------------------


class Halves(Partner):
    """x = (x + received) / 2, as it is usually printed."""

    def _move(self, theirs: Tensor, sent: Tensor) -> None:
        super()._move(theirs, self.shown)


class Forgets(Partner):
    """Takes a word that comes twice for two."""

    def answer(self, stamp: Stamp, payload: tuple[Tensor, ...]) -> Receipt:
        self._answered.clear()
        return super().answer(stamp, payload)


class Drops(Partner):
    """Publishes its progress over what has landed while it was asking."""

    def drain(self, parameters: Tensor) -> None:
        if self.open:
            self.owed.zero_()
        super().drain(parameters)


class AsksAnew(Partner):
    """Asks for another exchange where it has not heard the end of one."""

    def ask(self, peer: int, step: int, within_seconds: float | None = None) -> Push:
        self._asked.pop(peer, None)
        return super().ask(peer, step, within_seconds)


class Trades(Partner):
    """Takes part in both exchanges where two workers ask each other at once."""

    def answer(self, stamp: Stamp, payload: tuple[Tensor, ...]) -> Receipt:
        asked = self._asked.pop(stamp.worker, None)
        receipt = super().answer(stamp, payload)
        if asked is not None:
            self._asked[stamp.worker] = asked
        return receipt


class Rounds(Partner):
    """Forgets that others read its numbers as rounded."""

    def _move(self, theirs: Tensor, sent: Tensor) -> None:
        super()._move(theirs, sent if sent.equal(theirs) else self.shown)


def polite(partner: Partner) -> PeerScript:
    """Lets others wait until its own exchange has ended."""
    waiting: list[Arrived] = []
    while True:
        heard = yield Await()
        waiting.extend([heard] if isinstance(heard, Arrived) else [])
        while waiting and not partner.open:
            op = waiting.pop()
            assert isinstance(op.op, Push)
            yield Reply(token=op.token, answer=partner.answer(op.op.stamp, op.op.payload))


def result(script: PeerScript, answer: Receipt) -> Any:
    """What a script returns when it hears its last answer."""
    try:
        return pytest.fail(f"it said {script.send(answer)} instead of ending")
    except StopIteration as stop:
        return stop.value


# -- any interleaving ------------------------------------------------------------------------------


class Schedule:
    """Workers whose every message may be late, lost or doubled, and who may be interrupted: one draw per event."""

    def __init__(
        self,
        seed: int,
        world: int,
        rule: type[Partner] = Partner,
        script: Any = answering,
        compressor: Compressor | None = None,
    ) -> None:
        self.draw = random.Random(seed)
        self.parameters = [torch.tensor([float(self.draw.randrange(64) * UNIT)] * 2).double() for _ in range(world)]
        self.partners = [partner(rank, each, rule, compressor=compressor) for rank, each in enumerate(self.parameters)]
        self.given = sum(float(each[0]) for each in self.parameters)
        self.script, self.steps, self.landed = script, [0] * world, 0
        self.answerers = [script(each) for each in self.partners]
        self.calls: list[tuple[PeerScript, Push] | None] = [None] * world
        self.asks: list[Push] = []
        self.receipts: list[tuple[Push, Receipt]] = []
        self.tokens: dict[int, Push] = {}
        for each in self.answerers:
            next(each)

    def begin(self, rank: int) -> None:
        """Ask a neighbour, unless this worker is asking already."""
        peer = self.partners[rank].neighbor(Complete(), len(self.partners), self.steps[rank])
        if self.calls[rank] is None and peer is not None:
            call = initiate(self.partners[rank], peer, self.steps[rank])
            self.steps[rank] += 1
            push = next(call)
            assert isinstance(push, Push)
            self.calls[rank] = call, push
            self.asks.append(push)

    def train(self, rank: int) -> None:
        """A step of the optimizer, and what happens between steps."""
        gradient = self.draw.randrange(-8, 8) * UNIT
        self.given += gradient
        self.parameters[rank] += gradient
        self.partners[rank].drain(self.parameters[rank])

    def interrupt(self, rank: int) -> None:
        """Scripts end in the middle and begin again; what they own stays."""
        self.calls[rank] = None
        self.answerers[rank].close()
        self.answerers[rank] = self.script(self.partners[rank])
        next(self.answerers[rank])

    def carry_ask(self, doubled: bool = False) -> None:
        if self.asks:
            place = self.draw.randrange(len(self.asks))
            push = self.asks[place] if doubled else self.asks.pop(place)
            token = len(self.tokens)
            self.tokens[token] = push
            sender, rank = Peer(WORKER, push.stamp.worker), push.to.number
            self.hear(rank, Arrived(moment=0.0, token=token, sender=sender, op=push))

    def hear(self, rank: int, heard: Arrived | Elapsed) -> None:
        said = self.answerers[rank].send(heard)
        while isinstance(said, Reply):
            assert isinstance(said.answer, Receipt)
            self.receipts.append((self.tokens[said.token], said.answer))
            said = next(self.answerers[rank])

    def carry_receipt(self) -> None:
        if self.receipts:
            push, receipt = self.receipts.pop(self.draw.randrange(len(self.receipts)))
            call = self.calls[push.stamp.worker]
            if call is not None and call[1] is push:
                self.calls[push.stamp.worker] = None
                self.landed += result(call[0], receipt)

    def lose(self) -> None:
        lost: list[Any] = self.draw.choice([self.asks, self.receipts])
        if lost:
            lost.pop(self.draw.randrange(len(lost)))

    def event(self) -> None:
        rank, kind = self.draw.randrange(len(self.partners)), self.draw.randrange(16)
        match kind:
            case 0 | 1 | 2 | 3:
                self.begin(rank)
            case 4 | 5 | 6:
                self.train(rank)
            case 7 | 8 | 9:
                self.carry_ask()
            case 10 | 11 | 12:
                self.carry_receipt()
            case 13:
                self.carry_ask(doubled=True)
            case 14:
                self.lose()
            case 15:
                self.interrupt(rank)

    def finish(self) -> None:
        """Let every exchange end, as resends bring about; a circle that waits for itself never does."""
        for _ in range(8):
            for rank, each in enumerate(self.partners):
                if each.open:
                    call = self.calls[rank]
                    self.begin(rank) if call is None else self.asks.append(call[1])
            while self.asks or self.receipts:
                self.carry_ask()
                self.carry_receipt()
            if not any(each.open for each in self.partners):
                return
            for rank in range(len(self.partners)):
                self.hear(rank, Elapsed(moment=0.0))
        stuck = {rank: each.open for rank, each in enumerate(self.partners) if each.open}
        raise AssertionError(f"workers wait for each other for ever: {stuck}")

    def check(self) -> None:
        for rank, each in enumerate(self.partners):
            each.drain(self.parameters[rank])
            assert each.shown.equal(self.parameters[rank])
        assert sum(float(each[0]) for each in self.parameters) == self.given, "the sum moved"


def interleave(seeds: range, events: int = 12, world: int = 3, **options: Any) -> int:
    landed = 0
    for seed in seeds:
        schedule = Schedule(seed, world, **options)
        for _ in range(events):
            schedule.event()
        schedule.finish()
        schedule.check()
        landed += schedule.landed
    return landed


def test_ten_thousand_interleavings_conserve_the_sum_and_none_gets_stuck() -> None:
    assert interleave(range(SCHEDULES)) > SCHEDULES
    assert interleave(range(20), events=300, world=5) > 400


@pytest.mark.parametrize("rule", [Halves, Forgets, Drops, AsksAnew])
def test_interleavings_find_rules_that_lose_something(rule: type[Partner]) -> None:
    with pytest.raises(AssertionError, match="the sum moved"):
        interleave(range(200), rule=rule)


def test_interleavings_find_workers_that_wait_for_each_other() -> None:
    with pytest.raises(AssertionError, match="wait for each other"):
        interleave(range(200), script=polite)


@pytest.mark.parametrize("compressor", [Dense(dtype="bfloat16"), QSGD(levels=127)], ids=repr)
def test_what_was_rounded_is_conserved_as_well(compressor: Compressor) -> None:
    interleave(range(5), compressor=compressor)
    with pytest.raises(AssertionError, match="the sum moved"):
        interleave(range(5), compressor=compressor, rule=Rounds)


def missing(seed: int, counted: bool = True) -> float:
    """Worker 0 ends for good in the middle of things; what that does to the sum, of all and of what it left with.

    At most half of what two workers were apart, for each exchange whose end will not be heard.
    """
    schedule, seen = Schedule(seed, 4), [0.0]
    for _ in range(40):
        schedule.event()
        seen += [float(each.shown[0]) for each in schedule.partners]
    dead, *alive = schedule.partners
    schedule.asks = [push for push in schedule.asks if push.to.number]
    schedule.receipts = [each for each in schedule.receipts if each[0].to.number and each[0].stamp.worker]
    schedule.calls = [call if rank and call and call[1].to.number else None for rank, call in enumerate(schedule.calls)]
    for each in alive:
        each.mark_gone(0)
        each.abandon(0)
    half_done = sum(dead.abandon(peer) for peer in dead.open)
    schedule.finish()
    half_done += sum(each.abandoned for each in alive)
    moved = abs(sum(float(each.shown[0]) for each in schedule.partners) - schedule.given)
    assert moved <= half_done * counted * (max(seen) - min(seen)) / 2, "more is missing than was counted"
    return moved


def test_a_worker_lost_for_good_takes_no_more_along_than_is_counted() -> None:
    moved = [missing(seed) for seed in range(200)]
    assert 10 < sum(each > 0 for each in moved) < 150
    with pytest.raises(AssertionError, match="more is missing"):
        [missing(seed, counted=False) for seed in range(200)]


# -- one exchange ----------------------------------------------------------------------------------


def check_gradients_count_in_full(rule: type[Partner]) -> None:
    """A gradient applied on either side, between what was sent and what is heard, is not averaged away."""
    asks, answers = partner(0, [8.0 * UNIT], rule), partner(1, [0.0], rule)
    here, there = asks.shown.clone(), answers.shown.clone()
    push = asks.ask(1, 0)
    here += 5 * UNIT
    asks.drain(here)
    receipt = answers.answer(push.stamp, push.payload)
    there += 3 * UNIT
    answers.drain(there)
    assert asks.land(push, receipt)
    asks.drain(here)
    assert [here.item(), there.item()] == [9 * UNIT, 7 * UNIT]


def test_gradients_applied_meanwhile_count_in_full() -> None:
    check_gradients_count_in_full(Partner)
    with pytest.raises(AssertionError):
        check_gradients_count_in_full(Halves)


def test_one_exchange_to_the_last_number() -> None:
    asks, answers = partner(2, [0.0, 8.0]), partner(5, [4.0, 2.0])
    push = asks.ask(5, 7, within_seconds=3.0)
    assert (push.to, push.key, push.stamp, push.within_seconds) == (Peer(WORKER, 5), "average", Stamp(2, 7), 3.0)
    assert push.payload[0].tolist() == [0.0, 8.0]
    receipt = answers.answer(push.stamp, push.payload)
    assert receipt.version == 1
    assert receipt.payload[0].tolist() == [4.0, 2.0]
    assert asks.land(push, receipt)
    assert not asks.land(push, receipt), "an answer that comes twice moves nothing"
    for each, owed in ((asks, [2.0, -3.0]), (answers, [-2.0, 3.0])):
        assert each.shown.tolist() == [2.0, 5.0]
        assert each.owed.tolist() == owed
        assert (each.version, each.open, each.declined, each.abandoned) == (1, (), 0, 0)


def test_who_asks_again_hears_the_same() -> None:
    asks, answers = partner(0, [1.0]), partner(1, [3.0])
    push = asks.ask(1, 4)
    first = answers.answer(push.stamp, push.payload)
    exchange(partner(2, [9.0]), answers, 0)
    assert answers.answer(push.stamp, push.payload) is first
    assert asks.ask(1, 5) is push, "an exchange without an end is asked for in identical bytes"
    asks.land(push, first)
    assert exchange(asks, answers, 5)
    moved = answers.shown
    assert answers.answer(push.stamp, push.payload).version == -1, "of two of a worker, the older comes too late"
    assert answers.answer(Stamp(0, 5, 99), push.payload).version == -1, "the same step of another life is another word"
    assert answers.shown is moved


def test_what_was_shown_is_never_written_again() -> None:
    asks, answers = partner(0, [1.0]), partner(1, [3.0])
    push = asks.ask(1, 0)
    receipt = answers.answer(push.stamp, push.payload)
    exchange(answers, partner(2, [9.0]), 0)
    asks.drain(torch.tensor([50.0], dtype=torch.float64))
    assert (push.payload[0].item(), receipt.payload[0].item()) == (1.0, 3.0)


def meet(rule: type[Partner]) -> tuple[Partner, Partner]:
    """Two workers ask each other at the same moment."""
    low, high = partner(0, [0.0], rule), partner(1, [8.0], rule)
    up, down = low.ask(1, 0), high.ask(0, 0)
    to_high, to_low = low.answer(down.stamp, down.payload), high.answer(up.stamp, up.payload)
    high.land(down, to_high)
    low.land(up, to_low)
    return low, high


def test_workers_that_ask_each_other_average_once() -> None:
    low, high = meet(Partner)
    assert (low.shown.item(), high.shown.item()) == (4.0, 4.0)
    assert (low.declined, high.declined) == (0, 1)
    low, high = meet(Trades)
    assert (low.shown.item(), high.shown.item()) == (8.0, 0.0)


def test_workers_that_ask_in_a_circle_average_their_neighbours() -> None:
    endpoints = [partner(rank, [value]) for rank, value in enumerate([0.0, 6.0, 12.0])]
    pushes = [each.ask((each.rank + 1) % 3, 0) for each in endpoints]
    receipts = [endpoints[push.to.number].answer(push.stamp, push.payload) for push in pushes]
    for each, push, receipt in zip(endpoints, pushes, receipts, strict=True):
        assert each.land(push, receipt)
    assert sum(each.shown.item() for each in endpoints) == 18.0
    assert distance(endpoints) < 72.0 / 2


def test_nonsense_moves_nothing() -> None:
    one, other = partner(0, [1.0, 2.0]), partner(1, [3.0, 4.0])
    before = other.shown
    bad = [(), (torch.zeros(3).double(),), (torch.zeros(2),), (torch.zeros(2).double(), torch.zeros(1))]
    bad += [(torch.tensor([value, 0.0]).double(),) for value in (float("nan"), float("inf"))]
    for step, payload in enumerate(bad):
        assert other.answer(Stamp(0, step), payload).version == -1
        push = one.ask(1, step)
        with pytest.raises(MalformedError):
            one.land(push, Receipt(version=1, payload=payload))
    assert one.shown.tolist() == [1.0, 2.0]
    assert other.shown is before
    assert (one.open, one.abandoned) == ((), len(bad))


def test_parameters_that_are_not_finite_stay_where_they_are() -> None:
    broken, sound = partner(0, [float("nan")]), partner(1, [3.0])
    assert list(initiate(broken, 1, 0)) == []
    assert exchange(sound, broken, 0) is False
    assert sound.shown.item() == 3.0


LOSSY = [
    *(OneBit(), TopK(density=0.01), Route(TopK(density=0.01)), TopK(density=0.5, feedback=False), TernGrad()),
    *(RandomK(density=0.5, feedback=False), PowerSGD(rank=2, feedback=False), Feedback(Dense())),
]


@pytest.mark.parametrize("compressor", LOSSY, ids=repr)
def test_letters_that_lose_parameters_are_refused(compressor: Compressor) -> None:
    with pytest.raises(RecipeError, match=r"Write Gossip\(\) with it, .* or Gossip\('pairwise'\)"):
        partner(0, torch.zeros(8), compressor=compressor)


@pytest.mark.parametrize(
    "compressor", [Dense(), Dense(dtype="float16"), Int8(), Route(Int8(stochastic=True))], ids=repr
)
def test_letters_that_are_nearly_exact_are_not(compressor: Compressor) -> None:
    one, other = (partner(rank, torch.full((8,), 4.0 + rank), compressor=compressor) for rank in range(2))
    assert exchange(one, other, 0)
    assert one.shown.tolist() == pytest.approx([4.5] * 8, rel=0.02)


class Eager(Partner):
    """Writes to the parameters in every step, whether anything is owed or not."""

    def drain(self, parameters: Tensor) -> None:
        self._owes = True
        super().drain(parameters)


def check_drains(rule: type[Partner]) -> None:
    """Parameters are written when something has landed, and then hold all of it."""
    one, other = partner(0, [4.0], rule), partner(1, [8.0], rule)
    parameters = torch.tensor([5.0], dtype=torch.float64)
    written = parameters._version
    one.drain(parameters)
    assert (one.shown.item(), parameters._version) == (5.0, written), "written though nothing was owed"
    assert exchange(one, other, 0)
    one.drain(parameters)
    assert (one.shown.item(), parameters.item(), one.owed.item()) == (6.5, 6.5, 0.0)
    written = parameters._version
    one.drain(parameters)
    assert parameters._version == written, "written though nothing was owed any more"


def test_parameters_are_written_where_something_landed() -> None:
    check_drains(Partner)
    with pytest.raises(AssertionError, match="nothing was owed"):
        check_drains(Eager)


class Swallows(Partner):
    """Takes what parameters of half precision cannot hold for applied."""

    def drain(self, parameters: Tensor) -> None:
        super().drain(parameters)
        self.owed.zero_()
        self.shown = parameters.to(self.shown.dtype, copy=True)


def drift_in_half_precision(rule: type[Partner]) -> float:
    """What parameters around 256, of which bfloat16 holds every second, lose while another moves in small steps."""
    coarse, fine = torch.tensor([256.0], dtype=torch.bfloat16), torch.tensor([260.0])
    one, other = (rule(FlatTensors.pack({"weight": each}), rank) for rank, each in enumerate((coarse, fine)))
    for step in range(8):
        exchange(one, other, step)
        fine += 0.25
        one.drain(coarse)
        other.drain(fine)
    return one.shown.item() + other.shown.item() - (256 + 260 + 8 * 0.25)


def test_half_precision_keeps_what_it_owes_in_float32() -> None:
    assert drift_in_half_precision(Partner) == 0.0
    assert drift_in_half_precision(Swallows) != 0.0


# -- who is asked ----------------------------------------------------------------------------------


def test_neighbours_are_drawn_by_seed_rank_and_step() -> None:
    drawn = [partner(0, [0.0], seed=7).neighbor(Ring(), 5, step) for step in range(2000)]
    assert set(drawn) == {1, 4}
    assert abs(drawn.count(1) - 1000) < 4 * sqrt(2000) / 2
    assert drawn == [partner(0, [9.0], seed=7).neighbor(Ring(), 5, step) for step in range(2000)]
    for options in ({"seed": 8}, {"seed": 7, "rank": 2}):
        others = partner(**{"rank": 0, "values": [0.0], **options})
        assert [others.neighbor(Complete(), 5, step) for step in range(50)] != drawn[:50]


def test_who_left_is_not_asked_and_who_owes_an_answer_comes_first() -> None:
    one = partner(0, [0.0])
    one.mark_gone(4)
    assert {one.neighbor(Ring(), 5, step) for step in range(50)} == {1}
    one.mark_gone(1)
    assert one.neighbor(Ring(), 5, 0) is None
    one.mark_here(4)
    one.mark_here(1)
    assert {one.neighbor(Ring(), 5, step) for step in range(50)} == {1, 4}
    one.ask(4, 0)
    assert {one.neighbor(Ring(), 5, step) for step in range(50)} == {4}
    one.mark_gone(4)
    assert {one.neighbor(Ring(), 5, step) for step in range(50)} == {1}
    assert one.abandon(4)
    assert not one.abandon(4)
    assert (one.open, one.abandoned) == ((), 1)
    assert partner(0, [0.0]).neighbor(Complete(), 1, 0) is None


# -- scripts ---------------------------------------------------------------------------------------


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


# -- agreement -------------------------------------------------------------------------------------


def distance(partners: Sequence[Partner]) -> float:
    """The squared distance of all from their mean."""
    every = torch.stack([each.shown for each in partners])
    return float((every - every.mean(0)).square().sum())


def averaged(world: int, exchanges: int, seed: int, topology: Topology, towards: int | None = None) -> float:
    """What is left of the squared distance. towards: who is asked instead of a neighbour that was drawn."""
    draw = random.Random(seed)
    partners = [partner(rank, [draw.gauss(0, 1) for _ in range(4)], seed=seed) for rank in range(world)]
    before = distance(partners)
    for step in range(exchanges):
        rank = draw.randrange(world)
        peer = partners[rank].neighbor(topology, world, step) if towards is None else (rank + towards) % world
        assert peer is not None
        exchange(partners[rank], partners[peer], step)
    return distance(partners) / before


def check_rate(tuner: int = 300, world: int = 6, exchanges: int = 8, **options: Any) -> None:
    """E V' = (1 - 1/(n-1)) V: a pair loses |x_i - x_j|^2 / 2, and the n (n-1) / 2 pairs' squares add up to n V.

    That holds whatever the start is, so the ratio of the last to the first has this expectation as well.
    """
    left = torch.tensor([averaged(world, exchanges, seed, Complete(), **options) for seed in range(tuner)])
    expected = (1 - 1 / (world - 1)) ** exchanges
    z = float((left.mean() - expected) / (left.std() / sqrt(tuner)))
    assert abs(z) < 4, f"z = {z}"


def test_workers_agree_as_fast_as_random_pairs_do() -> None:
    check_rate()
    with pytest.raises(AssertionError, match="z = "):
        check_rate(towards=1)


@pytest.mark.parametrize("topology", [Ring(), Complete()], ids=repr)
def test_workers_agree(topology: Topology) -> None:
    assert averaged(8, 600, 1, topology) < 1e-6


# -- virtual time ----------------------------------------------------------------------------------


class Machine:
    """A worker with a speed of its own. What it remembers survives a kill, as if it were read back."""

    def __init__(self, rank: int, seed: int, rule: type[Partner], step_seconds: float) -> None:
        self.draw = random.Random(rng.address("machine", seed, rank))
        self.parameters = torch.tensor([self.draw.gauss(0, 1) for _ in range(2)], dtype=torch.float64)
        self.partner = partner(rank, self.parameters, rule, seed=seed)
        self.given = self.parameters.clone()
        self.step_seconds, self.trained, self.asked = step_seconds, 0, 0

    def train(self, steps: int, size: float) -> PeerScript:
        while self.trained < steps:
            yield from compute(self.step_seconds)
            gradient = torch.tensor([self.draw.gauss(0, size) for _ in range(2)], dtype=torch.float64)
            self.trained += 1
            self.parameters += gradient
            self.given += gradient
            self.partner.drain(self.parameters)

    def call(self, world: int, topology: Topology, exchanges: int, patience_seconds: float) -> PeerScript:
        while self.asked < exchanges or self.partner.open:
            yield from compute(self.step_seconds)
            self.asked += 1
            peer = self.partner.neighbor(topology, world, self.asked)
            if peer is not None:
                with suppress(PeerLost):
                    yield from initiate(self.partner, peer, self.asked, patience_seconds)


def train(
    seed: int,
    net: VirtualNetwork,
    world: int = 4,
    steps: int = 8,
    rule: type[Partner] = Partner,
    topology: Topology | None = None,
    size: float = 1.0,
    unequal: float = 0.2,
) -> tuple[list[Machine], Trace]:
    """Machines train and average, each `unequal` seconds slower than the one before. net: its faults are of workers."""
    machines = [Machine(rank, seed, rule, 0.7 + unequal * rank) for rank in range(world)]
    patience_seconds = 2.0 + 2 * net.round_trip_seconds  # who gives up before an answer can be there never hears one
    scripts: dict[Peer, Callable[[], PeerScript]] = {}
    for rank, each in enumerate(machines):
        scripts[Peer(WORKER, rank)] = partial(answering, each.partner)
        scripts[Peer(TRAINER, rank)] = partial(each.train, steps, size)
        scripts[Peer(CALLER, rank)] = partial(each.call, world, topology or Complete(), steps, patience_seconds)
    net = of_machines(net)
    answerers = [Peer(WORKER, rank) for rank in range(world)]
    trace = simulate_peers(scripts, net, seed, servers=answerers, checks=True, most_seconds=10_000.0)
    for each in machines:
        each.partner.drain(each.parameters)
    return machines, trace


def bad_network(seed: int, world: int = 4) -> VirtualNetwork:
    return VirtualNetwork.random(seed, [Peer(WORKER, rank) for rank in range(world)], horizon_seconds=8.0)


def check_sum(machines: Sequence[Machine]) -> None:
    ended, given = (torch.stack(each).sum(0) for each in zip(*((m.parameters, m.given) for m in machines), strict=True))
    assert float((ended - given).abs().max()) < 1e-12, "the sum moved"
    assert all(machine.partner.open == () for machine in machines)


@pytest.mark.parametrize("block", blocks(200), ids=block_name)
def test_the_sum_survives_bad_networks(block: range) -> None:
    troubled = 0
    for seed in block:
        with replayed(seed, "the_sum_survives"):
            machines, trace = train(seed, bad_network(seed))
            check_sum(machines)
            assert all(machine.trained == 8 for machine in machines)
        troubled += trace.lost > 0 and trace.duplicated > 0
    assert troubled >= len(block) // 8


@pytest.mark.parametrize("rule", [Halves, Forgets, Drops, AsksAnew])
def test_bad_networks_find_rules_that_lose_something(rule: type[Partner]) -> None:
    with pytest.raises(AssertionError, match="the sum moved"):
        [check_sum(train(seed, bad_network(seed), rule=rule)[0]) for seed in range(200)]


def test_a_letter_goes_each_way_for_every_exchange() -> None:
    machines, trace = train(0, VirtualNetwork(round_trip_seconds=0.1))
    answered = sum(each.asked - each.partner.declined for each in machines)
    letter = payload_bytes((machines[0].parameters,))
    assert sum(trace.sent_bytes.values()) == letter * (answered + sum(each.asked for each in machines))


def left_of_distance(net: VirtualNetwork, steps: int, **options: Any) -> float:
    machines, _ = train(1, net, steps=0, size=0.0, **options)
    start = distance([each.partner for each in machines])
    machines, _ = train(1, net, steps=steps, size=0.0, **options)
    return distance([each.partner for each in machines]) / start


@pytest.mark.parametrize("topology", [Ring(), Complete()], ids=repr)
@pytest.mark.parametrize("round_trip_seconds", [0.0, 0.9, 20.0])
def test_workers_agree_however_long_their_words_travel(topology: Topology, round_trip_seconds: float) -> None:
    net = VirtualNetwork(round_trip_seconds=round_trip_seconds, jitter_seconds=0.1, dead_after_seconds=100.0)
    assert left_of_distance(net, 120, world=6, topology=topology) < 1e-6


@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_workers_in_step_agree_as_well(world: int) -> None:
    """All ask at the same moments, and every word travels equally long."""
    net = VirtualNetwork(round_trip_seconds=0.5)
    assert left_of_distance(net, 120, world=world, topology=Ring(), unequal=0.0) < 1e-6
    if world == 2:
        assert left_of_distance(net, 120, world=world, topology=Ring(), unequal=0.0, rule=Trades) == pytest.approx(1.0)
