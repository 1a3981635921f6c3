"""Pairwise gossip: one exchange to the last number, which neighbor is asked, and how fast workers agree."""

from __future__ import annotations

import random
from math import sqrt
from typing import Any

import pytest
import torch
from support.pairwise_partners import UNIT, Halves, Trades, distance, exchange, partner
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
from gossamer.algorithms.gossip.pairwise import Partner
from gossamer.algorithms.gossip.pairwise_scripts import initiate
from gossamer.algorithms.topologies import Complete, Ring, Topology
from gossamer.base.layout import FlatTensors
from gossamer.base.peer_ops import WORKER, Peer, Receipt, Stamp
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
