"""Workers that leave a simulated group."""

from __future__ import annotations

import pytest
import torch
from laws.laws import in_threads

from gossamer.base.ops import AllGather, AllReduceMean
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import MismatchError, PeerLost


def test_who_leaves_after_a_round_takes_nobody_along() -> None:
    group = SimulatedGroup(3, patience_seconds=30)

    def work(rank: int) -> list[str]:
        said = group.transports[rank].all_gather_text(str(rank))
        group.transports[rank].close()
        return said

    for _ in range(1):
        assert in_threads(work, 3) == 3 * [["0", "1", "2"]]


def test_others_go_on_in_parts_where_nobody_is_missing() -> None:
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


def test_who_does_not_come_in_time_is_named() -> None:
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
