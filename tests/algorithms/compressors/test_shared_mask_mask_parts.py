"""Mask parts: equal parts that tile a buffer, masks of one size from any mask, and codes that nobody wrote."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.algorithms.compressors.shared_mask import MaskParts, marked
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.kernels import encode_places
from gossamer.errors import MalformedError


def masked(n: int, places: list[int]) -> Tensor:
    mask = torch.zeros(n, dtype=torch.bool)
    mask[places] = True
    return mask


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 200), st.integers(1, 12), st.floats(0.001, 1.0))
def test_parts_tile_the_buffer_and_each_has_room_for_its_share(numel: int, world: int, density: float) -> None:
    if numel < world:
        return
    parts = MaskParts.of(numel, world, density)
    bounds = [parts.bounds(rank, world) for rank in range(world)]
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == numel
    assert [parts.bounds(rank, 3) for rank in range(world)] == [bounds[(rank + 3) % world] for rank in range(world)]
    assert all(1 <= parts.each <= end - begin <= parts.longest for begin, end in bounds)
    assert min(density * numel, numel // world * world) <= parts.total + 0.5


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 64, 1003])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("start", [0, 3, 8])
def test_marks_are_found_eight_at_a_time_as_one_at_a_time(n: int, density: float, start: int) -> None:
    drawn = torch.rand(n + start, generator=rng.generator("mask", n)) < density
    assert torch.equal(marked(drawn[start:]), drawn[start:].nonzero().view(-1))


def test_a_mask_of_the_right_size_is_taken_as_it_is() -> None:
    assert MaskParts.of(40, 4, 0.1).fitted(masked(40, [0, 11, 12, 39])).tolist() == [0, 11, 12, 39]


def test_at_first_the_places_are_evenly_spread() -> None:
    assert MaskParts.of(40, 4, 0.2).fitted(masked(40, [])).tolist() == [0, 5, 10, 15, 20, 25, 30, 35]


@settings(max_examples=80, deadline=None)
@given(st.integers(8, 90), st.integers(1, 8), st.floats(0.01, 1.0), st.data())
def test_a_mask_of_another_size_is_fitted(numel: int, world: int, density: float, data: st.DataObject) -> None:
    parts = MaskParts.of(numel, world, density)
    before = data.draw(st.sets(st.integers(0, numel - 1)))
    found = parts.fitted(masked(numel, sorted(before))).tolist()
    assert found == sorted(set(found))
    assert len(found) == parts.total
    assert set(found) <= before if len(before) >= parts.total else set(found) >= before


@pytest.mark.parametrize("step", [0, 1, 5])
def test_what_every_rank_chose_is_marked_in_its_part(step: int) -> None:
    parts, at = MaskParts.of(23, 3, 0.25), partial(AggregationContext, step=step, world=3)
    x = torch.randn(23, generator=rng.generator("parts"))
    mask = torch.ones(23, dtype=torch.bool)
    parts.mark([(parts.chosen(x, at(rank=rank)),) for rank in range(3)], mask, at(rank=0))
    for rank in range(3):
        begin, end = parts.bounds(rank, step)
        best = x[begin:end].abs().topk(parts.each).indices + begin
        assert mask[begin:end].nonzero().view(-1).add(begin).tolist() == sorted(best.tolist())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda coded: (coded[1:],),
        lambda coded: (coded.int(),),
        lambda coded: (coded, coded),
        lambda coded: (),
        lambda coded: (torch.full_like(coded, 255),),
    ],
)
def test_codes_that_nobody_wrote_are_refused_before_anything_is_written(spoil) -> None:  # type: ignore[no-untyped-def]
    parts, at = MaskParts.of(400, 4, 0.05), partial(AggregationContext, step=9, world=4)
    codes = [parts.chosen(torch.randn(400, generator=rng.generator("codes")), at(rank=rank)) for rank in range(4)]
    mask = masked(400, [1, 2])
    with pytest.raises(MalformedError, match="rank 2 in step 9"):
        parts.mark([(codes[0],), (codes[1],), spoil(codes[2]), (codes[3],)], mask, at(rank=0))
    assert mask.nonzero().view(-1).tolist() == [1, 2]


def test_a_place_beyond_the_part_is_refused() -> None:
    """Parts differ by one entry, and a code has room for the longest."""
    parts = MaskParts.of(10, 4, 0.1)
    assert [parts.bounds(rank, 0)[1] - parts.bounds(rank, 0)[0] for rank in range(4)] == [2, 3, 2, 3]
    codes = [(encode_places(torch.tensor([2], dtype=torch.int32), 3),)] * 4
    with pytest.raises(MalformedError, match=r"rank 0 .*beyond the 2 entries of this rank's part"):
        parts.mark(codes, masked(10, []), AggregationContext(world=4))
