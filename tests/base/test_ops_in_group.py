"""Collectives within sub-groups at the same moment: who answers, what it costs, and groups that do not fit together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laws.laws import in_threads

from gossamer.base.coalesce import coalesce
from gossamer.base.op_semantics import answer_all
from gossamer.base.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Coalesced,
    CollectiveOp,
    InGroup,
    NeighborAllGather,
    Script,
    in_group,
)
from gossamer.base.runner import price, simulate
from gossamer.comm.network import read_network
from gossamer.comm.network.cost.op_cost import seconds
from gossamer.comm.simulated import SimulatedGroup
from gossamer.comm.throttled import ThrottledTransport
from gossamer.errors import MismatchError

EVEN, ODD = (0, 2), (1, 3)
FAST = read_network("1gbit", 4)


def told(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def test_each_group_answers_its_own() -> None:
    said = [InGroup(ODD if rank % 2 else EVEN, AllReduceMean(told(rank))) for rank in range(4)]
    assert [float(heard) for heard in answer_all(said)] == [1, 2, 1, 2]
    mixed: list[CollectiveOp] = [
        InGroup(EVEN, AllReduceMean(told(rank))) if rank in EVEN else InGroup(ODD, AllGather((told(rank),)))
        for rank in range(4)
    ]
    first, second, third, fourth = answer_all(mixed)
    assert (first, third) == (1, 1)
    assert second == fourth == [(told(1),), (told(3),)]


def test_ranks_are_places_in_the_group() -> None:
    parts = [tuple((told(10 * rank + place),) for place in range(2)) for rank in range(4)]
    heard = answer_all([InGroup(ODD if rank % 2 else EVEN, AllToAll(parts[rank])) for rank in range(4)])
    assert [[int(x) for (x,) in each] for each in heard] == [[0, 20], [10, 30], [1, 21], [11, 31]]
    edges = ((1, 1.0),), ((0, 1.0),)
    heard = answer_all(
        [InGroup(ODD if rank % 2 else EVEN, NeighborAllGather((told(rank),), edges[rank // 2])) for rank in range(4)]
    )
    assert [[int(x) for (x,) in each] for each in heard] == [[2], [3], [0], [1]]


@pytest.mark.parametrize(
    "groups",
    [
        [(0, 1), (0, 1), (2, 3), (1, 3)],  # overlap
        [(0, 1), (0, 1), (2, 3), (3,)],  # not named alike
        [(1,), (0, 1), (2, 3), (2, 3)],  # without itself
        [(1, 0), (1, 0), (2, 3), (2, 3)],  # not ascending
        [(0, 1), (0, 1), (2, 3, 4), (2, 3, 4)],  # nobody there
    ],
)
def test_groups_that_are_not_each_others_are_refused(groups: list[tuple[int, ...]]) -> None:
    with pytest.raises(MismatchError, match="not each other's"):
        answer_all([InGroup(ranks, AllReduceMean(told(1))) for ranks in groups])


def test_everyone_is_in_a_group() -> None:
    with pytest.raises(MismatchError, match="InGroup, AllReduceMean"):
        answer_all([InGroup((0,), AllReduceMean(told(1))), AllReduceMean(told(1))])


def conversation(rank: int) -> Script:
    """Within pairs, with what the pairs' places have told each other in between."""
    mean = yield AllReduceMean(told(rank))
    heard, other = yield Coalesced((AllGather((mean,)), AllReduceMean(2 * mean)))
    return float(mean), [float(x) for (x,) in heard], float(other)


def test_a_script_of_a_group_is_said_in_a_larger_one() -> None:
    found = simulate([in_group(ODD if rank % 2 else EVEN, conversation(rank // 2)) for rank in range(4)])
    assert found == [(0.5, [0.5, 0.5], 1.0)] * 4
    assert found[:2] == simulate([conversation(rank) for rank in range(2)])


def test_groups_of_groups_are_groups() -> None:
    """An op of places (0, 1) of ranks (1, 3, 5, 7) is one of ranks (1, 3)."""

    def within() -> Script:
        yield Coalesced((InGroup((0, 1), AllReduceMean(told(1))), AllReduceMean(told(1))))

    op = next(in_group((1, 3, 5, 7), within()))
    assert isinstance(op, Coalesced)
    assert [each.ranks for each in op.ops if isinstance(each, InGroup)] == [(1, 3), (1, 3, 5, 7)]


def test_words_of_one_group_travel_together() -> None:
    def script(ranks: tuple[int, ...], number: float) -> Script:
        return (yield InGroup(ranks, AllReduceMean(told(number))))

    def both(rank: int) -> Script:
        mine = ODD if rank % 2 else EVEN
        return coalesce([script(mine, rank), script(mine, 10 * rank), script((rank,), rank)])

    joined = next(both(0))
    assert isinstance(joined, Coalesced)
    assert [each.ranks for each in joined.ops if isinstance(each, InGroup)] == [EVEN, (0,)]
    assert simulate([both(rank) for rank in range(4)]) == [
        [told(1), told(10), told(0)],
        [told(2), told(20), told(1)],
        [told(1), told(10), told(2)],
        [told(2), told(20), told(3)],
    ]


def test_over_transports_that_meet_in_this_process() -> None:
    group = SimulatedGroup(4)

    def work(rank: int) -> Any:
        return float(group.transports[rank].answer(InGroup(ODD if rank % 2 else EVEN, AllReduceMean(told(rank)))))

    assert in_threads(work, 4) == [1, 2, 1, 2]


# -- what it costs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op",
    [AllReduceMean(torch.zeros(6)), AllGather((torch.zeros(6),)), AllToAll(((torch.zeros(6),), (torch.zeros(2),)))],
)
def test_bytes_are_those_of_the_group(op: AllReduceMean | AllGather | AllToAll) -> None:
    assert [InGroup(ODD, op).bytes_sent(4, rank) for rank in ODD] == [op.bytes_sent(2, place) for place in range(2)]
    assert [each.bytes_sent for each in price(said(InGroup(ODD, op)), 4, 3)] == [op.bytes_sent(2, 1)]


def said(op: CollectiveOp) -> Script:
    yield op


def test_meta_answers_are_the_groups() -> None:
    small, large = (torch.empty(2, device="meta"),), (torch.empty(3, device="meta"),)
    assert InGroup((1, 5), AllToAll((small, large))).meta_answer(8, 5) == [large, large]
    assert InGroup((1, 5), AllGather(small)).meta_answer(8, 1) == [small, small]


@pytest.mark.parametrize(
    ("ranks", "world", "groups"),
    [
        ((2, 3), 6, [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5)]),
        ((1, 4), 6, [(0, 3), (1, 4), (2, 5), (0, 3), (1, 4), (2, 5)]),
        ((1, 3), 8, [(0, 2), (1, 3), (0, 2), (1, 3), (4, 6), (5, 7), (4, 6), (5, 7)]),
        ((2,), 4, [(0,), (1,), (2,), (3,)]),
        ((0, 3), 4, [(0, 3), (1,), (2,), (0, 3)]),  # nothing is like it
        ((1, 2), 4, [(0,), (1, 2), (1, 2), (3,)]),
    ],
)
def test_others_speak_in_groups_that_are_alike(
    ranks: tuple[int, ...], world: int, groups: list[tuple[int, ...]]
) -> None:
    op = InGroup(ranks, AllReduceMean(told(1)))
    assert [op.group_of(rank, world) for rank in range(world)] == groups
    seconds(op, read_network("1gbit", world))  # comes to an end


def test_a_group_takes_the_time_of_its_own_lines() -> None:
    """Two sites of two, 80 ms apart."""
    sites = read_network("examples/networks/two-sites-80ms.toml", 4)
    op = AllGather((torch.zeros(1000),))
    where = [sites.hosts[rank].site for rank in range(4)]
    here = tuple(rank for rank in range(4) if where[rank] == where[0])
    there = (0, next(rank for rank in range(4) if where[rank] != where[0]))
    assert seconds(InGroup(here, op), sites) < 0.01
    assert seconds(InGroup(there, op), sites) >= 0.04
    assert seconds(InGroup((0, 1, 2, 3), op), sites) == seconds(op, sites)


def test_paced_prices_are_of_the_group() -> None:
    paced = ThrottledTransport(SimulatedGroup(4).transports[0], FAST)
    op = AllReduceMean(torch.zeros(4000))
    prices = [paced._price(each) for each in (InGroup((0, 1), op), InGroup((0, 1, 2, 3), op), op)]
    assert prices[0] < prices[1] == prices[2]
