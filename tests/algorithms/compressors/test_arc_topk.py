"""ARC-Top-K: one choice of rows for all ranks, by a sketch of the mean; what it keeps; and bytes that stay flat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from math import nan
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws.laws import LAYOUT, Group
from support.aggregations import aggregate, priced_bytes
from torch import Tensor

from gossamer.algorithms.compressors import ARCTopK, Feedback, TopK, arc_topk
from gossamer.algorithms.compressors import arc_topk as module
from gossamer.algorithms.compressors.arc_topk import RowBlocks, row_blocks, signs, squared_norms
from gossamer.algorithms.compressors.error_feedback import RESIDUAL
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext, AggregationResult, State
from gossamer.base.layout import FlatTensors, Layout
from gossamer.base.ops import Script
from gossamer.base.runner import simulate
from gossamer.errors import NotFinite

ONE = Layout.of({"w": (16, 8)})
ODD = Layout.of({"a": (5, 7), "b": (3,), "c": (40,)})


def integers(rank: int, layout: Layout = ONE, world: int = 4) -> Tensor:
    """Multiples of the number of workers, so that every sum and mean is exact."""
    return world * torch.randint(-9, 9, (layout.numel,), generator=rng.generator("integers", rank)).float()


# -- the same rows everywhere ------------------------------------------------------------------------------------------


def check_same_places(compressor: Any, layout: Layout = LAYOUT, world: int = 4, steps: int = 5) -> None:
    """Unlike data: every rank sends the entries of the same places, and these are where the mean is."""
    group = Group(compressor, world, layout=layout)
    for _ in range(steps):
        staged = group.aggregate(group.gradients())
        for each in staged:
            assert torch.equal(each.own != 0, staged[0].own != 0), "ranks sent entries of different places"
            assert torch.equal(each.mean, staged[0].mean), "ranks heard different means"


@pytest.mark.parametrize("layout", [LAYOUT, ODD], ids=["laws", "odd"])
@pytest.mark.parametrize("world", [2, 5])
def test_ranks_of_unlike_data_send_the_same_rows(layout: Layout, world: int) -> None:
    check_same_places(Feedback(ARCTopK(density=0.2, row=8)), layout, world)
    check_same_places(ARCTopK(density=0.3, row=6, rank=3), layout, world)


def unlike_signs(group: list[int]) -> Callable[..., Tensor]:
    """A twin: every rank's generator is its own."""
    return lambda key, count, like: SIGNS(rng.address(key, group.append(1) or len(group)), count, like)


SIGNS = arc_topk.signs


def test_the_check_catches_ranks_that_choose_by_themselves() -> None:
    def selfish(script: Script) -> Script:
        """Hears its own sketch instead of the mean."""
        op = next(script)
        said = op.tensors()[0].clone()
        yield op
        op = script.send(said)
        while True:
            try:
                op = script.send((yield op))
            except StopIteration as stop:
                return stop.value

    class Selfish(ARCTopK):
        def aggregate(self, *args: Any, **options: Any) -> Any:
            return selfish(super().aggregate(*args, **options))

    with pytest.raises(AssertionError, match="different"):
        check_same_places(Selfish(density=0.2, row=8))


def times_chosen(world: int = 8, steps: int = 40) -> int:
    """How often the only row that is left in the mean is chosen, beside one that the ranks cancel among themselves."""
    inputs = [torch.zeros(16, 8) for _ in range(world)]
    for rank, x in enumerate(inputs):
        x[3, 0] = 1
        x[7] = 100 * (-1) ** rank
    flat, chosen = [x.view(-1) for x in inputs], 0
    for step in range(steps):
        at = partial(AggregationContext, step=step, world=world)
        found = aggregate(ARCTopK(density=1 / 16, row=8), flat, ONE, at=lambda rank, at=at: at(rank=rank))
        chosen += bool(found[0].mean[24:32].any())
    return chosen


def test_all_ranks_draw_the_same_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With unlike ones the places would still agree, since only the mean is looked at, and be those of noise."""
    assert times_chosen() == 40
    monkeypatch.setattr(arc_topk, "signs", unlike_signs([]))
    assert times_chosen() < 20


# -- what is kept of the mean ------------------------------------------------------------------------------------------


def captured(inputs: list[Tensor], compressor: ARCTopK, layout: Layout) -> tuple[float, float]:
    """(squared norm of what the group agreed on, that of the mean); what it agreed on is the mean in some rows."""
    mean = torch.stack(inputs).mean(0)
    (found, *_) = aggregate(compressor, inputs, layout)
    assert torch.equal(found.mean, torch.where(found.mean != 0, mean, 0)), "an entry is not the mean"
    return float(found.mean.double().square().sum()), float(mean.double().square().sum())


def spiky(rows: int, row: int, draw: int) -> Tensor:
    """Rows of ones, rows of one entry, rows alike and rows of zeros, by chance; integers that bfloat16 has."""
    source = rng.generator("spiky", draw)
    kinds = torch.randint(0, 4, (rows,), generator=source)
    found = torch.randint(-4, 5, (rows, row), generator=source).float()
    found[kinds == 0] = 1
    found[kinds == 1] = 0
    found[kinds == 1, 0] = torch.randint(1, 9, (int((kinds == 1).sum()),), generator=source).float()
    found[kinds == 2] = 0
    return found.reshape(-1)


def expected_share(compressor: ARCTopK, x: Tensor, layout: Layout, patch: pytest.MonkeyPatch) -> float:
    """The share of the squared norm that is kept, on average over all signs: no draw is left to chance."""
    shares = []
    for drawn in product([-1.0, 1.0], repeat=compressor.row // compressor.rank):
        v = torch.tensor(drawn)
        patch.setattr(arc_topk, "signs", lambda key, count, like, v=v: v.to(like.dtype))
        kept, whole = captured([x - 4, x + 4], compressor, layout)
        shares.append(kept / whole)
    return sum(shares) / len(shares)


@pytest.mark.parametrize("rank", [1, 2, 6])
def test_it_contracts_as_its_law_has_it_over_all_signs(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """E |mean - C(mean)|^2 <= (1 - rank K / (row m)) |mean|^2, whatever the mean."""
    layout, compressor = Layout.of({"w": (10, 6)}), ARCTopK(density=0.2, row=6, rank=rank)
    for draw in range(6):
        x = spiky(10, 6, draw)
        if x.any():
            assert expected_share(compressor, x, layout, monkeypatch) >= rank / 6 * 2 / 10 - 1e-12


def smallest(x: Tensor, sizes: Any, counts: Any) -> tuple[Tensor, Tensor]:
    return LARGEST(1 / (x + 1e-9), sizes, counts)


LARGEST = arc_topk.largest


def test_the_law_catches_the_smallest_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arc_topk, "largest", smallest)
    compressor = ARCTopK(density=0.2, row=6, rank=6)
    assert expected_share(compressor, spiky(10, 6, 1), Layout.of({"w": (10, 6)}), monkeypatch) < 0.2


def test_a_share_of_k_in_m_rows_would_be_too_much_to_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are alike are over- or underrated together, and then a smaller one stands out."""
    x = torch.ones(12, 8)
    x[5] = 0
    x[5, 0] = 2.5
    share = expected_share(ARCTopK(density=1 / 12, row=8), x.view(-1) * 4, Layout.of({"w": (96,)}), monkeypatch)
    assert 1 / 8 / 12 < share < 1 / 12


def test_of_random_rows_it_keeps_more_than_rows_drawn_by_chance_would() -> None:
    """By eight standard deviations and more; and with one number for every entry, the largest rows exactly."""
    layout, keeps = Layout.of({"w": (64, 16)}), []
    for draw in range(200):
        source = rng.generator("heavy", draw)
        x = torch.randn(64, 16, generator=source) * torch.randn(64, 1, generator=source).exp()
        kept, whole = captured([x.view(-1)], ARCTopK(density=0.125, row=16, rank=4), layout)
        keeps.append(kept / whole)
        best = x.square().sum(1).topk(8).values.sum()
        exact, _ = captured([x.view(-1)], ARCTopK(density=0.125, row=16, rank=16), layout)
        assert exact >= 0.98 * float(best), "bfloat16 moves rows that are nearly alike, and no others"
    found = torch.tensor(keeps)
    assert (float(found.mean()) - 0.125) / (float(found.std()) / 200**0.5) > 8


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_one_step_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, rows of two, signs + and -: the second and the fourth row have the largest sketch of the mean."""
    monkeypatch.setattr(arc_topk, "signs", lambda key, count, like: torch.tensor([1.0, -1.0]))
    inputs = [torch.tensor([8.0, 0, 2, -2, 5, 5, 0, 3]), torch.tensor([-8.0, 0, 4, -2, 5, 5, 0, 3])]
    layout = Layout.of({"w": (4, 2)})
    scripts = [
        ARCTopK(density=0.5, row=2).aggregate(FlatTensors(x, layout), State(), AggregationContext(rank=r, world=2))
        for r, x in enumerate(inputs)
    ]
    first = [next(script) for script in scripts]
    assert [op.tensor.view(-1).tolist() for op in first] == [[8, 4, 0, -3], [-8, 6, 0, -3]]
    assert all(op.tensor.dtype == torch.bfloat16 for op in first)
    heard = torch.tensor([[0.0], [5], [0], [-3]], dtype=torch.bfloat16)
    second = [script.send(heard.clone()) for script in scripts]
    assert [op.tensor.tolist() for op in second] == [[2, -2, 0, 3], [4, -2, 0, 3]]
    for script in scripts:
        with pytest.raises(StopIteration) as end:
            script.send(torch.tensor([3.0, -2, 0, 3]))
        assert end.value.value.mean.tolist() == [0, 0, 3, -2, 0, 0, 0, 3]


def test_feedback_keeps_what_did_not_travel_and_nothing_else() -> None:
    group = Group(Feedback(ARCTopK(density=0.25, row=8)), 4, layout=ONE, dtype=torch.float32)
    inputs = [integers(rank) for rank in range(4)]
    given, told = torch.stack(inputs).sum(0), torch.zeros(ONE.numel)
    for _ in range(6):
        staged = group.aggregate(inputs)
        told += 4 * staged[0].mean
        waits = torch.stack([state[RESIDUAL].flat for state in group.states]).sum(0)
        assert torch.equal(told + waits, given)
        inputs = [torch.zeros(ONE.numel)] * 4
    assert not waits.any(), "four steps of a quarter of the rows send everything"


# -- the edges ---------------------------------------------------------------------------------------------------------


def test_integers_are_exact() -> None:
    for world in (2, 3, 7):
        inputs = [integers(rank, ODD, world) for rank in range(world)]
        captured(inputs, ARCTopK(density=0.3, row=8), ODD)


def test_bytes_of_a_worker_are_flat_in_the_workers() -> None:
    compressor, layout = ARCTopK(density=0.01), Layout.of({"w": (1000, 640)})
    rows, itemsize = 10_000, 4
    for world in range(1, 9):
        expected = 2 * (world - 1) / world * (100 * 64 * itemsize + 2 * rows)
        assert priced_bytes(compressor, world, layout) == expected
    assert priced_bytes(compressor, 64, layout) < 1.13 * priced_bytes(compressor, 8, layout)
    assert priced_bytes(TopK(density=0.01), 64, layout) > 8 * priced_bytes(TopK(density=0.01), 8, layout)


@pytest.mark.parametrize(("row", "rank"), [(0, 1), (8, 3), (8, 0), (8, 16)])
def test_rows_that_cannot_be_cut_are_refused(row: int, rank: int) -> None:
    with pytest.raises(ValueError, match=r"Write ARCTopK\(density=0.1, row=64, rank=1\)"):
        ARCTopK(density=0.1, row=row, rank=rank)


# -- what is not finite ------------------------------------------------------------------------------------------------


def test_values_that_leave_the_range_though_their_sketch_does_not_are_told_to_all() -> None:
    layout = Layout.of({"w": (4, 2)})
    inputs = [torch.tensor([3e38, -3e38 * sign, 1, 1, 1, 1, 1, 1]) for sign in (1.0, 1.0, 1.0)]
    for step in range(8):
        at = partial(AggregationContext, step=step, world=3)
        scripts = [
            ARCTopK(density=1 / 4, row=2).aggregate(FlatTensors(x, layout), State(), at(rank=rank))
            for rank, x in enumerate(inputs)
        ]
        try:
            found: list[AggregationResult] = simulate(scripts)
        except NotFinite:
            continue  # signs under which the sketch itself is too large
        assert {each.finite for each in found} == {bool(torch.isfinite(found[0].mean).all())}


def deceived(script: Script, number: int) -> Script:
    """Hears of its number-th operation that the mean is no number."""
    answer: Any = None
    for count in range(3):
        try:
            op = script.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = yield op
        if count == number:
            answer = torch.full_like(op.tensors()[0], nan)
    raise AssertionError("more operations than two")


@pytest.mark.parametrize("number", [0, 1])
def test_a_mean_that_is_not_finite_is_reported(number: int) -> None:
    at = AggregationContext(world=2)
    x = FlatTensors(integers(0), ONE)
    scripts = [deceived(ARCTopK(density=0.1, row=8).aggregate(x, State(), at), number) for _ in range(2)]
    assert not any(staged.finite for staged in simulate(scripts))


# -- collectives, peers, going on --------------------------------------------------------------------------------------


def test_another_step_has_other_signs() -> None:
    at = AggregationContext(seed=7)
    drawn = [next(ARCTopK(density=0.1).aggregate(FlatTensors(torch.ones(1107), LAYOUT), State(), each)).tensor
             for each in (at, replace(at, step=1), replace(at, seed=8), replace(at, rank=3, world=4))]  # fmt: skip
    assert torch.equal(drawn[0], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


# -- every entry in one row, and a sketch that is right on average and as fast to take as it is short ------------------


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
def test_norms_are_in_proportion_regardless_of_the_range(scale: float) -> None:
    sketch = torch.tensor([[3.0, 4.0], [0.0, 5.0], [1.0, 0.0]]) * scale
    found = squared_norms(sketch)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, torch.tensor([25.0, 25.0, 1.0]) / 25 * (scale > 0))
