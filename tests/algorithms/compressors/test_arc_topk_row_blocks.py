"""Row blocks: every entry in one row, and a sketch that is right on average and as fast to take as it is short."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gossamer.algorithms.compressors import arc_topk as module
from gossamer.algorithms.compressors.arc_topk import RowBlocks, row_blocks, signs, squared_norms
from gossamer.base import rng

SIZES = (40, 0, 1, 9, 16)
ROWS = row_blocks(SIZES, 8)


def numbers(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=rng.generator("rows", seed), dtype=torch.float64)


def by_hand(x: Tensor, sizes: tuple[int, ...], row: int, v: Tensor) -> Tensor:
    """The sketch, entry by entry."""
    found: list[list[float]] = []
    start = 0
    for size in sizes:
        for begin in range(0, size, row):
            entries = [float(x[start + j]) if j < size else 0.0 for j in range(begin, begin + row)]
            pieces = [entries[i : i + len(v)] for i in range(0, row, len(v))]
            found.append([sum(a * float(b) for a, b in zip(piece, v, strict=True)) for piece in pieces])
        start += size
    return torch.tensor(found, dtype=x.dtype)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 12))
def test_every_entry_lies_in_one_row(sizes: list[int], row: int) -> None:
    blocks = RowBlocks(tuple(sizes), row)
    places = blocks.places(torch.arange(blocks.total, dtype=torch.int32))
    assert places.tolist() == list(range(sum(sizes)))
    apart = [blocks.places(torch.tensor([each], dtype=torch.int32)).tolist() for each in range(blocks.total)]
    assert [place for row_places in apart for place in row_places] == list(range(sum(sizes)))


@pytest.mark.parametrize("small", [0, 2**14])
@pytest.mark.parametrize("pieces", [1, 2, 4, 8])
@pytest.mark.parametrize("sizes", [SIZES, (16, 8), (3,), (0,), (8, 16, 0, 9, 8, 8, 3, 24)])
def test_a_sketch_is_what_it_is_by_hand(
    sizes: tuple[int, ...], pieces: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SMALL", small)
    x, v = numbers(sum(sizes)), signs(5, 8 // pieces, torch.empty(0, dtype=torch.float64))
    found = RowBlocks(sizes, 8).sketch(x, v)
    assert found.shape == (row_blocks(sizes, 8).total, pieces)
    if found.numel():
        torch.testing.assert_close(found, by_hand(x, sizes, 8, v), rtol=1e-12, atol=1e-12)


def test_it_is_linear_so_that_the_mean_of_sketches_is_the_sketch_of_the_mean() -> None:
    xs = [torch.randint(-99, 99, (sum(SIZES),), generator=rng.generator("linear", i)).float() for i in range(4)]
    v = signs(11, 8, xs[0])
    apart = torch.stack([ROWS.sketch(x, v) for x in xs]).sum(0)
    assert torch.equal(apart, ROWS.sketch(torch.stack(xs).sum(0), v))


def test_over_all_signs_the_mean_square_is_the_squared_norm_exactly() -> None:
    x = torch.randint(-9, 9, (8,), generator=rng.generator("norm")).double()
    for piece in (8, 4, 2):
        every = [torch.tensor(v, dtype=torch.float64) for v in product([-1.0, 1.0], repeat=piece)]
        squares = torch.stack([row_blocks((8,), 8).sketch(x, v).square().sum() for v in every])
        assert float(squares.mean()) == float(x.square().sum())


def test_signs_are_even_and_each_key_has_its_own() -> None:
    drawn = torch.stack([signs(rng.address("signs", key), 16, torch.empty(0)) for key in range(2000)])
    assert set(drawn.unique().tolist()) == {-1.0, 1.0}
    assert float(drawn.mean(0).abs().max()) * 2000**0.5 <= 4.5
    both = (drawn[:, 1:] * drawn[:, :-1]).mean(0)
    assert float(both.abs().max()) * 2000**0.5 <= 4.5
    assert torch.equal(drawn[7], signs(rng.address("signs", 7), 16, torch.empty(0)))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e36])
def test_norms_are_in_proportion_whatever_the_range(scale: float) -> None:
    sketch = torch.tensor([[3.0, 4.0], [0.0, 5.0], [1.0, 0.0]]) * scale
    found = squared_norms(sketch)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, torch.tensor([25.0, 25.0, 1.0]) / 25 * (scale > 0))
