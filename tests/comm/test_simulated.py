"""Workers that leave a simulated group."""

from __future__ import annotations

import pytest
import torch
from laws.laws import in_threads
from torch import Tensor

from gossamer.base.ops import AllGather, AllReduceMean, AllToAll
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import MismatchError, PeerLost


def test_a_peer_that_leaves_after_a_round_takes_nobody_along() -> None:
    group = SimulatedGroup(3, patience_seconds=30)

    def work(rank: int) -> list[str]:
        said = group.transports[rank].all_gather_text(str(rank))
        group.transports[rank].close()
        return said

    for _ in range(1):
        assert in_threads(work, 3) == 3 * [["0", "1", "2"]]


def test_others_continue_in_parts_where_nobody_is_missing() -> None:
    group = SimulatedGroup(4, patience_seconds=30)

    def work(rank: int) -> str:
        part = group.transports[rank].part(2)
        part.all_gather_text("all are here")
        if rank == 3:
            group.transports[rank].close()
            return "left"
        try:
            return str(len(part.all_gather_text("again")))
        except PeerLost as lost:
            return str(lost)

    assert in_threads(work, 4) == ["2", "2", "rank 1 has left while rank 0 waited for it", "left"]


@pytest.mark.parametrize(("end", "told"), [("close", "rank 1 has left"), ("leave", "the group was broken off")])
def test_a_part_that_is_made_after_an_end_has_the_same_end(end: str, told: str) -> None:
    group = SimulatedGroup(4, patience_seconds=30)  # a part that waits tells that rank 1 has not come
    if end == "close":
        group.transports[1].close()
    else:
        group.leave()
    with pytest.raises(PeerLost, match=told):
        group.transports[0].part(2).all_gather_text("is anybody there?")
    if end == "close":
        others = in_threads(lambda rank: len(group.transports[2 + rank].part(2).all_gather_text("here")), 2)
        assert others == [2, 2]


def test_a_peer_that_does_not_come_in_time_is_named() -> None:
    transport = SimulatedGroup(2, patience_seconds=0.0).transports[0]
    for _ in range(2):
        with pytest.raises(PeerLost, match="rank 1 has not come while rank 0 waited"):
            transport.all_gather_text("anybody?")


def test_all_hear_of_a_mismatch() -> None:
    group = SimulatedGroup(2, patience_seconds=30)

    def work(rank: int) -> str:
        tensor = torch.zeros(2)
        try:
            group.transports[rank].answer(AllReduceMean(tensor) if rank else AllGather((tensor,)))
        except MismatchError as failure:
            return str(failure)
        return "answered"

    first, second = in_threads(work, 2)
    assert first == second
    assert "AllGather, AllReduceMean" in first


# -- sub-groups of neighboring ranks, simulated ------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "size"), [(4, 2), (6, 2), (6, 3), (3, 3), (3, 1)])
def test_blocks_communicate_among_themselves_next_to_the_whole(world: int, size: int) -> None:
    group = SimulatedGroup(world)

    def work(rank: int) -> None:
        whole = group.transports[rank]
        part = whole.part(size)
        block = list(range(rank - rank % size, rank - rank % size + size))
        assert (part.rank, part.world) == (rank % size, size)
        for turn in range(3):
            mine = torch.full((3,), float(10 * rank + turn))
            assert torch.equal(
                part.answer(AllReduceMean(mine.clone())), torch.full((3,), 10 * sum(block) / size + turn)
            )
            assert [int(x) for (x,) in part.answer(AllGather((torch.tensor([rank]),)))] == block
            for _ in range(block[0] // size):
                part.all_gather_text("as often as a block likes, whatever others do")
            assert whole.all_gather_text(str(rank)) == [str(each) for each in range(world)]
        addressed = tuple((torch.tensor([rank, peer]),) for peer in range(size))
        assert [pair.tolist() for (pair,) in part.answer(AllToAll(addressed))] == [
            [peer, rank % size] for peer in block
        ]
        told = torch.tensor([float(rank)])
        part.broadcast_([told], source=size - 1)
        assert told.item() == block[-1]
        assert part.all_gather_text(f"I am {rank}") == [f"I am {peer}" for peer in block]

    in_threads(work, world)


def test_a_part_is_the_same_when_it_is_asked_for_again() -> None:
    group = SimulatedGroup(4)

    def work(rank: int) -> Tensor:
        first, again = (group.transports[rank].part(2) for _ in range(2))
        transport = first if rank % 2 else again
        heard: Tensor = transport.answer(AllReduceMean(torch.tensor([float(rank)])))
        return heard

    assert [float(mean) for mean in in_threads(work, 4)] == [0.5, 0.5, 2.5, 2.5]


def test_a_peer_that_leaves_the_whole_leaves_its_part() -> None:
    group = SimulatedGroup(4, patience_seconds=30)

    def work(rank: int) -> str:
        part = group.transports[rank].part(2)
        part.all_gather_text("all are here")
        if rank == 3:
            group.leave()
            return "left"
        try:
            part.all_gather_text("is anybody there?")
        except PeerLost:
            return "alone"
        return "together"

    said = in_threads(work, 4)
    assert said[2:] == ["alone", "left"]
