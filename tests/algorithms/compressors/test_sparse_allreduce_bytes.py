"""Bytes of sparse all-reduce: they do not grow with the workers, and the dense mean is taken where that is cheaper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laws.laws import LAYOUT, Group, perform_together
from support.aggregations import priced, priced_bytes

from gossamer.algorithms.compressors import Compressor, Dense, Feedback, SparseSum, TopK
from gossamer.algorithms.compressors import sparse_allreduce as module
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.algorithms.compressors.index_regions import Regions
from gossamer.base.kernels import coded_bytes
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import AllGather, AllReduceMean, AllToAll

SUM = Feedback(SparseSum(TopK(density=0.01)))
MILLION = Layout.of({"w": (2**20,)})
META: Any = {"dtype": torch.float32, "device": torch.device("meta")}


def said(compressor: Compressor, world: int, layout: Layout = MILLION) -> list[Any]:
    return priced(compressor, world, layout)


def sent(compressor: Compressor, world: int, layout: Layout = MILLION) -> float:
    return priced_bytes(compressor, world, layout)


# -- bytes -------------------------------------------------------------------------------------------------------------


def check_flat(compressor: Compressor) -> None:
    k = round(0.01 * 2**20)
    found = [sent(compressor, world) / ((world - 1) / world) for world in (4, 16, 64, 256)]
    assert max(found) <= 24 * k, f"{max(found) / k} bytes an entry"
    assert max(found) <= 1.25 * min(found), "bytes grow with the workers"


def test_bytes_hardly_grow_with_the_workers() -> None:
    check_flat(SUM)
    with pytest.raises(AssertionError):
        check_flat(Feedback(TopK(density=0.01)))


def test_the_bound_holds_wherever_a_region_gets_forty_entries() -> None:
    for density in (0.1, 0.01, 0.001, 0.0001):
        k = round(density * 2**20)
        for world in (world for world in (2, 3, 8, 64, 256) if k >= 40 * world):
            assert sent(SparseSum(TopK(density=density)), world) <= 24 * k * (world - 1) / world


def test_a_sum_travels_in_two_words() -> None:
    assert [op.op for op in said(SUM, 4)] == [AllToAll.name, AllGather.name]


@pytest.mark.parametrize("world", [6, 7])
def test_what_is_priced_is_sent(world: int) -> None:
    compressor = Feedback(SparseSum(TopK(density=0.05)))
    assert {done.bytes_sent for done in perform_together(compressor, world)} == {sent(compressor, world, LAYOUT)}


# -- dense where that is cheaper ---------------------------------------------------------------------------------------


def over_dense(numel: int, world: int, density: float) -> float:
    """By how many bytes a message to one other worker exceeds its share of a dense mean, for one tensor."""
    choice, x = SparseSum(TopK(density=density)), FlatTensors.zeros(Layout.of({"w": (numel,)}), **META)
    rows = Regions(numel, world).rows
    return 4 + sum(4 * room + coded_bytes(room, rows) for room in choice.rooms(x, world)) - 2 * 4 * numel / world


def check_crossing() -> None:
    most = SparseSum(TopK(density=0.7))
    over = {numel: over_dense(numel, 4, 0.7) for numel in range(16, 3000)}
    tie = next(numel for numel in over if over[numel] == 0)
    dearer, cheaper = (next(n for n in over if sign * over[n] > 0) for sign in (1, -1))
    for numel, op in ((tie, AllReduceMean), (dearer, AllReduceMean), (cheaper, AllToAll)):
        layout = Layout.of({"w": (numel,)})
        assert said(Feedback(most), 4, layout)[0].op == said(most, 4, layout)[0].op == op.name
        assert (sent(most, 4, layout) == sent(Dense(), 4, layout)) == (op is AllReduceMean)


def test_it_is_the_dense_mean_where_that_costs_as_much_or_less(monkeypatch: pytest.MonkeyPatch) -> None:
    check_crossing()
    strict = lambda payload_bytes, x, at: at.world * payload_bytes > 2 * 4 * x.layout.numel  # noqa: E731
    monkeypatch.setattr(module, "dearer_than_dense", strict)
    with pytest.raises(AssertionError):
        check_crossing()


def test_a_dense_mean_leaves_nothing_and_pays_what_waited() -> None:
    group = Group(Feedback(SparseSum(TopK(density=1.0))), 3)
    for rank, state in enumerate(group.states):
        state[RESIDUAL].flat.fill_(float(3 * rank))
    staged = group.aggregate([torch.ones(LAYOUT.numel, dtype=torch.float64)] * 3)
    assert torch.equal(staged[0].mean, torch.full_like(staged[0].mean, 4.0))
    assert not any(state[RESIDUAL].flat.any() for state in group.states)
