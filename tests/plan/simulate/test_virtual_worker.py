"""Worlds that bring their groups along."""

from __future__ import annotations

import pytest
from laws.laws import in_threads

from gossamer.errors import PeerLost
from gossamer.plan.simulate.virtual_worker import VirtualGroups, VirtualWorld


def test_all_workers_meet_in_the_same_groups_in_their_order() -> None:
    groups = VirtualGroups(3)

    def work(rank: int) -> list[list[str]]:
        world = VirtualWorld(rank, groups)
        assert (world.rank, world.size, world.is_first) == (rank, 3, rank == 0)
        first, second = world.own_transport(), world.own_transport()
        assert (first.rank, first.world) == (rank, 3)
        return [first.all_gather_text(f"first {rank}"), second.all_gather_text(f"second {rank}")]

    found = in_threads(work, 3)
    assert found == 3 * [[[f"first {rank}" for rank in range(3)], [f"second {rank}" for rank in range(3)]]]


def test_nobody_waits_for_a_script_that_is_over() -> None:
    groups = VirtualGroups(2)
    waiting = VirtualWorld(1, groups)
    there = waiting.own_transport()
    groups.close(0)
    for transport in (there, waiting.own_transport()):  # also in a group that is made later
        with pytest.raises(PeerLost, match="rank 0 has left while rank 1 waited for it"):
            transport.all_gather_text("anybody?")


def test_a_broken_job_breaks_groups_to_come() -> None:
    groups = VirtualGroups(2)
    groups.leave()
    with pytest.raises(PeerLost):
        VirtualWorld(0, groups).own_transport().all_gather_text("anybody?")
