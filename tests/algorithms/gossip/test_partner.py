"""Pairwise gossip: one exchange to the last number, which neighbor is asked, and how fast workers agree."""

from __future__ import annotations

import random
from math import sqrt
from typing import Any

import pytest
import torch
from support.nightly import nightly
from support.pairwise_partners import UNIT, AsksAnew, Drops, Forgets, Halves, Trades, distance, exchange, partner
from torch import Tensor

from gossamer.algorithms.compressors import (
    Compressor,
    Dense,
    Feedback,
    OneBit,
    PowerSGD,
    RandomK,
    Route,
    TernGrad,
    TopK,
)
from gossamer.algorithms.compressors.int8 import Int8
from gossamer.algorithms.compressors.qsgd import QSGD
from gossamer.algorithms.gossip.partner import Partner, answering, initiate
from gossamer.algorithms.topologies import Complete, Ring, Topology
from gossamer.base.layout import FlatTensors
from gossamer.base.peer_ops import WORKER, Arrived, Await, Elapsed, Peer, PeerScript, Push, Receipt, Reply, Stamp
from gossamer.errors import MalformedError, RecipeError

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
        assert each.unapplied.tolist() == owed
        assert (each.version, each.open, each.declined, each.abandoned) == (1, (), 0, 0)


def test_a_rank_that_asks_again_hears_the_same() -> None:
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
    with pytest.raises(RecipeError, match=r"Write Gossip\(\) with this compressor, .* or Gossip\('pairwise'\)"):
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
        self._pending_exchange = True
        super().drain(parameters)


def check_drains(rule: type[Partner]) -> None:
    """Parameters are written when something has landed, and then hold all of it."""
    one, other = partner(0, [4.0], rule), partner(1, [8.0], rule)
    parameters = torch.tensor([5.0], dtype=torch.float64)
    encoded = parameters._version
    one.drain(parameters)
    assert (one.shown.item(), parameters._version) == (5.0, encoded), "written though nothing was owed"
    assert exchange(one, other, 0)
    one.drain(parameters)
    assert (one.shown.item(), parameters.item(), one.unapplied.item()) == (6.5, 6.5, 0.0)
    encoded = parameters._version
    one.drain(parameters)
    assert parameters._version == encoded, "written though nothing was owed any more"


def test_parameters_are_written_where_something_landed() -> None:
    check_drains(Partner)
    with pytest.raises(AssertionError, match="nothing was owed"):
        check_drains(Eager)


class Swallows(Partner):
    """Takes what parameters of half precision cannot hold for applied."""

    def drain(self, parameters: Tensor) -> None:
        super().drain(parameters)
        self.unapplied.zero_()
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


def test_a_rank_that_left_is_not_asked_and_who_owes_an_answer_comes_first() -> None:
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


# -- agreement -------------------------------------------------------------------------------------


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


# -- pairwise gossip under any interleaving of messages: the sum is conserved, and no worker gets stuck ----------------


# -- rules that are wrong --------------------------------------------------------------------------


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
        """Let every exchange end, as resends bring about; a cycle that waits for itself never does."""
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


@pytest.mark.parametrize("schedules", [800, *nightly(10_000)])
def test_interleavings_conserve_the_sum_and_none_gets_stuck(schedules: int) -> None:
    """200 find every broken rule below."""
    assert interleave(range(schedules)) > schedules


def test_long_interleavings_of_five_conserve_the_sum() -> None:
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
