"""Means written apart from what they are made of: the same bits, and the numbers that went in stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.mesh_group import MESSAGE, Group

from gossamer.algorithms.collectives import DirectAllReduce, HalvingDoubling, RingAllReduce, TreeAllReduce
from gossamer.base.ops import AllGather, AllReduceMean
from gossamer.comm.mesh.native_mesh import Mesh

TABLES = [DirectAllReduce(), RingAllReduce(), HalvingDoubling(), TreeAllReduce()]


def given(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def check_apart(table: Any, world: int, numel: int, dtype: torch.dtype = torch.float32) -> None:
    xs = [given(rank, numel, dtype) for rank in range(world)]
    with Group(world, table) as group:
        inside = group.answers([AllReduceMean(x := each.clone(), x) for each in xs])
        apart = group.answers([AllReduceMean(each, torch.full_like(each, torch.nan)) for each in xs])
        fresh = group.answers([AllReduceMean(each) for each in xs])
    for rank in range(world):
        assert torch.equal(xs[rank], given(rank, numel, dtype)), "what went in was written to"
        assert torch.equal(apart[rank], inside[rank])
        assert torch.equal(fresh[rank], inside[rank])


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("table", TABLES, ids=repr)
def test_the_same_mean_and_what_went_in_stays(table: Any, world: int) -> None:
    for numel in (1, 1000, 3 * MESSAGE // 4 * world + 5):
        check_apart(table, world, numel)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_in_every_format(dtype: torch.dtype) -> None:
    check_apart(DirectAllReduce(), 3, 5001, dtype)


def test_what_does_not_lie_side_by_side() -> None:
    xs = [given(rank, 600, torch.float32).view(20, 30).t() for rank in range(2)]
    outs = [torch.empty(20, 30).t() for _ in xs]
    with Group(2) as group:
        heard = group.answers([AllReduceMean(x, out) for x, out in zip(xs, outs, strict=True)])
        fresh = group.answers([AllReduceMean(x) for x in xs])
    for each in (*outs, *heard, *fresh):
        assert torch.equal(each, (xs[0] + xs[1]) / 2)


def test_views_with_a_deferred_operation_have_the_mean_of_their_values() -> None:
    xs = [torch._neg_view(given(rank, 600, torch.float32)) for rank in range(2)]
    with Group(2) as group:
        for each in group.answers([AllReduceMean(x) for x in xs]):
            assert torch.equal(each, (xs[0] + xs[1]) / 2)
        strided = [given(rank, 600, torch.float32)[::2] for rank in range(2)]
        for received in group.answers([AllGather((x,)) for x in strided]):
            assert all(torch.equal(a, b) for (a,), b in zip(received, strided, strict=True))


def test_the_check_catches_sums_over_what_went_in(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Mesh.begin

    def over(self: Mesh, program: Any, places: Any, keep: object, sources: Any = None) -> int:
        return begin(self, program, places if sources is None else sources, keep)

    monkeypatch.setattr(Mesh, "begin", over)
    with pytest.raises(AssertionError, match="was written to"):
        check_apart(DirectAllReduce(), 2, 1000)
