"""Collective operations: what each says about itself agrees with the reference semantics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laws.laws import in_threads

from gossamer.base.op_semantics import answer_all
from gossamer.base.ops import (
    AllGather,
    AllReduceMean,
    AllToAll,
    Coalesced,
    CollectiveOp,
    InGroup,
    NeighborAllGather,
    Payload,
    Script,
    coalesce,
    in_group,
    payload_form,
)
from gossamer.base.runner import price, simulate
from gossamer.comm.network import read_network
from gossamer.comm.network.cost.op_cost import seconds
from gossamer.comm.simulated import SimulatedGroup
from gossamer.comm.throttled import ThrottledTransport
from gossamer.errors import MismatchError

WORLD = 3
X, Y = torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.float16)
GATHER, MIX = AllGather((X, Y)), NeighborAllGather((X,), tuple((peer, 1 / 3) for peer in range(WORLD)))
OPS: list[CollectiveOp] = [
    AllReduceMean(X),
    GATHER,
    AllToAll(((X,),) * WORLD),
    MIX,
    InGroup((0, 1, 2), GATHER),
    Coalesced((AllReduceMean(Y), MIX, InGroup((0, 1, 2), AllReduceMean(X)))),
]


UNEQUAL = [(X,), (Y, X), (Y,)]  # payloads by rank
FORMS = tuple(map(payload_form, UNEQUAL))


def test_payloads_of_unequal_forms_are_answered_by_rank() -> None:
    for ops in (
        [AllGather(payload, FORMS) for payload in UNEQUAL],
        [AllToAll((payload,) * WORLD, FORMS) for payload in UNEQUAL],
    ):
        for rank, answer in enumerate(answer_all(ops)):
            assert same(answer) == same(UNEQUAL)
            assert shapes(ops[rank].meta_answer(WORLD, rank)) == shapes(answer)
            assert {op.bytes_sent(WORLD, rank) for op in ops} == {2 * sum(each.nbytes for each in UNEQUAL[rank])}


def test_coalesced_operations_of_unequal_forms_are_answered_as_single_ones() -> None:
    def both(payload: Any) -> Script:
        ops = AllGather(payload, FORMS), AllGather((X, X)), AllGather(payload[:1], tuple(form[:1] for form in FORMS))
        return [same(answer) for answer in (yield from coalesce(list(map(ask, ops))))]

    for answers in simulate(list(map(both, UNEQUAL))):
        assert answers == [same(UNEQUAL), same([(X, X)] * WORLD), same([payload[:1] for payload in UNEQUAL])]


@pytest.mark.parametrize("kind", [AllGather, AllToAll])
def test_forms_that_the_ranks_do_not_send_are_rejected(kind: Any) -> None:
    payloads = UNEQUAL if kind is AllGather else [(each,) * WORLD for each in UNEQUAL]
    ops = [kind(payload, FORMS) for payload in payloads]
    with pytest.raises(MismatchError):
        answer_all([kind(payloads[0], FORMS[::-1]), *ops[1:]])


def test_unequal_payloads_without_forms_are_rejected() -> None:
    with pytest.raises(MismatchError):
        answer_all([AllGather(UNEQUAL[0]), *(AllGather(payload, FORMS) for payload in UNEQUAL[1:])])


def shapes(answer: Any) -> Any:
    return answer.shape if isinstance(answer, torch.Tensor) else [shapes(each) for each in answer]


def ask(op: CollectiveOp) -> Script:
    return (yield op)


@pytest.mark.parametrize("op", OPS, ids=lambda op: type(op).__name__)
def test_an_operation_knows_its_tensors_bytes_and_answer(op: CollectiveOp) -> None:
    assert shapes(op.meta_answer(WORLD, 0)) == shapes(answer_all([op] * WORLD)[0])
    assert op.map(lambda tensor: tensor) == op
    doubled = op.map(lambda tensor: torch.cat([tensor, tensor]))
    assert [each.numel() for each in doubled.tensors()] == [2 * each.numel() for each in op.tensors()]
    assert doubled.bytes_sent(WORLD) == 2 * op.bytes_sent(WORLD) > 0
    assert sum(each.bytes_sent(WORLD) for each in op.concurrent()) == op.bytes_sent(WORLD)


@pytest.mark.parametrize("op", OPS, ids=lambda op: type(op).__name__)
def test_coalesced_operations_are_answered_as_single_ones(op: CollectiveOp) -> None:
    alone, together = (simulate([script() for _ in range(WORLD)]) for script in (lambda: ask(op), lambda: twice(op)))
    assert together == [[same(answer), same(answer)] for answer in alone]


def twice(op: CollectiveOp) -> Script:
    return [same(answer) for answer in (yield from coalesce([ask(op), ask(op)]))]


def same(answer: Any) -> Any:
    """An answer as numbers, to be compared."""
    return answer.tolist() if isinstance(answer, torch.Tensor) else [same(each) for each in answer]


# -- Collectives within sub-groups at the same moment: who answers, what it costs, and groups that do not fit togethe

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


# -- Neighbor all-gather: edges that go one way, and edges with one end ------------------------------------------------


def say(payload: Payload, edges: tuple[tuple[int, float], ...], tells: tuple[int, ...] | None) -> Any:
    return (yield NeighborAllGather(payload, edges, tells))


def test_edges_may_go_one_way() -> None:
    ones = [torch.full((3,), float(rank)) for rank in range(3)]
    scripts = [say((ones[r],), (((r - 1) % 3, 0.5), (r, 0.5)), ((r + 1) % 3,)) for r in range(3)]
    heard = simulate(scripts)
    assert [[int(tensor[0]) for (tensor,) in each] for each in heard] == [[2, 0], [0, 1], [1, 2]]
    assert NeighborAllGather((ones[0],), ((2, 0.5), (0, 0.5)), (1,)).bytes_sent(3, 0) == 12
    assert NeighborAllGather((ones[0],), ((2, 0.5), (1, 0.5), (0, 0.5))).bytes_sent(3, 0) == 24


def test_edges_with_one_end_are_refused() -> None:
    one = (torch.zeros(1),)
    with pytest.raises(MismatchError, match=r"only one end.*0 to 1"):
        simulate([say(one, (), (1,)), say(one, (), ())])
