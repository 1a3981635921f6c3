"""Neighbor all-gather: edges that go one way, and edges with one end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gossamer.base.ops import NeighborAllGather, Payload
from gossamer.base.runner import simulate
from gossamer.errors import MismatchError


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
