"""Thin factors: compiled loops beside plain torch, over shapes around the widths of vectors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.base import rng
from gossamer.base.kernels import library
from gossamer.base.kernels import low_rank as compiled_loops
from gossamer.base.kernels.reference import low_rank as plain
from gossamer.base.kernels.reference.gram_schmidt import orthonormal_columns
from gossamer.base.kernels.reference.low_rank import Factoring
from gossamer.base.kernels.reference.residual import Residual
from gossamer.errors import NotFinite

TERMS = 1024.0
Shapes = list[tuple[int, ...]]
MIXES: dict[str, Shapes] = {
    "one": [(25, 40)],
    "alike": [(25, 40)] * 5,
    "mixed": [(9,), (12, 40), (0,), (30, 14), (10, 4, 3, 3), (10, 4, 3, 3), (5, 0), (1,), (64, 16)],
    "edges": [(17, columns) for columns in (9, 15, 16, 17, 31, 32, 33, 255, 256, 257)],
    "rows": [(rows, 24) for rows in (9, 10, 11, 12, 63, 64, 65, 128, 129)],
    "long": [(9, 2047), (9, 2048), (9, 2049), (70, 4100), (40,), (300, 1024)],
    "none": [(40,), (0,), (7,)],
    "empty": [],
}
RANKS = [1, 2, 3, 4, 5, 8]

compiled = pytest.mark.skipif(not library.LIBRARY.exists(), reason="the compiled loops were not built")
every_mix = pytest.mark.parametrize("mix", MIXES)
every_rank = pytest.mark.parametrize("rank", RANKS)


def factoring_of(shapes: Shapes, rank: int) -> Factoring:
    tensors, at = [], 0
    for shape in shapes:
        tensors.append((shape, torch.empty(shape, device="meta").stride(), at))
        at += math.prod(shape)
    cut = [len(shape) > 1 and math.prod(shape) > 0 and shape[0] >= rank for shape in shapes]
    return Factoring.of(rank, tensors, cut)


def draws(numel: int, name: str) -> Tensor:
    return torch.randn(numel, generator=rng.generator("low rank", name))


def whole_numbers(numel: int, name: str) -> Tensor:
    return torch.randint(-8, 9, (numel,), generator=rng.generator("low rank", name)).float()


class Round:
    """One exchange of a worker that is alone, by either module."""

    def __init__(self, module: Any, factoring: Factoring, draw: Any = draws, orthonormal: bool = True) -> None:
        numel = sum(place.numel for place in factoring.places)
        self.x, before, self.after = draw(numel, "x"), draw(numel, "before"), torch.full((numel,), 7.0)
        q = draw(factoring.right_numel, "q")
        self.first = module.project(self.x, factoring, q, TERMS, Residual(before, self.after))
        self.wanted = self.after.clone()
        self.p = self.first.clone()
        if orthonormal:
            module.orthonormalize(factoring, self.p)
        self.q = module.back_project(self.wanted, factoring, self.p, self.after)
        self.out = torch.full((numel,), 7.0)
        module.expand(factoring, self.p, self.q, self.out)


def pair(mix: str, rank: int, draw: Any = draws, orthonormal: bool = True) -> tuple[Factoring, Round, Round]:
    factoring = factoring_of(MIXES[mix], rank)
    fast, slow = (Round(module, factoring, draw, orthonormal) for module in (compiled_loops, plain))
    return factoring, fast, slow


@compiled
@every_mix
@every_rank
def test_products_of_whole_numbers_are_exact(mix: str, rank: int) -> None:
    _, fast, slow = pair(mix, rank, whole_numbers, orthonormal=False)
    small = [each.p.abs().max() if len(each.p) else torch.zeros(()) for each in (fast, slow)]
    assert torch.equal(fast.wanted, slow.wanted)
    assert torch.equal(fast.first, slow.first)
    assert small[0] == small[1] < 2**24
    if mix != "long":  # whose sums leave what float32 holds exactly
        assert torch.equal(fast.q, slow.q)
        assert torch.equal(fast.out, slow.out)
        assert torch.equal(fast.after, slow.after)


@compiled
@every_mix
@every_rank
def test_what_all_workers_compute_alike_has_the_same_bits(mix: str, rank: int) -> None:
    """Orthonormal columns and p q^T, from the same answers."""
    factoring, fast, slow = pair(mix, rank)
    first, outs = slow.first.clone(), []
    compiled_loops.orthonormalize(factoring, first)
    assert torch.equal(first, slow.p)
    for module in (compiled_loops, plain):
        outs.append(torch.full_like(slow.out, 7.0))
        module.expand(factoring, slow.p, slow.q, outs[-1])
    assert torch.equal(*outs)
    lefts = [slow.wanted.clone() for _ in range(2)]
    alike = plain.back_project(slow.wanted, factoring, slow.p, lefts[0])
    found = compiled_loops.back_project(slow.wanted, factoring, slow.p, lefts[1])
    torch.testing.assert_close(found, alike, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(lefts[1], lefts[0], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(fast.first, slow.first, atol=2e-4, rtol=1e-5)


@compiled
@every_mix
@every_rank
def test_what_is_left_and_what_was_sent_are_what_was_wanted(mix: str, rank: int) -> None:
    """What is left is the difference of the same product, bit for bit; nothing is left of what was not cut."""
    factoring, fast, _ = pair(mix, rank)
    assert torch.equal(fast.wanted - fast.out, fast.after)
    for place in factoring.others:
        assert not place.entries(fast.after).any()
        assert torch.equal(place.entries(fast.out), place.entries(fast.wanted))


@compiled
def test_another_order_of_p_q_has_other_bits() -> None:
    """What a library's product, or columns in another order, come to."""
    factoring, _, slow = pair("alike", 4)
    (run,) = factoring.runs
    other = torch.bmm(run.left(slow.p).double(), run.right(slow.q).double().mT).float().view(-1)
    backwards = plain._product(run.left(slow.p).flip(2), run.right(slow.q).flip(2)).view(-1)
    assert not torch.equal(other, slow.out)
    assert not torch.equal(backwards, slow.out)


@compiled
@pytest.mark.parametrize("module", [compiled_loops, plain])
def test_nothing_is_computed_from_a_neighbor(module: Any) -> None:
    """Each matrix by itself comes to the same numbers as among others, the last one at the buffer's end."""
    shapes = MIXES["mixed"]
    factoring, together = factoring_of(shapes, 3), Round(module, factoring_of(shapes, 3))
    for place in factoring.matrices:
        alone = factoring_of([place.shape], 3)
        w = place.entries(together.wanted).clone()
        p = together.p[place.left : place.left + 3 * place.rows].clone()
        q = module.back_project(w, alone, p)
        torch.testing.assert_close(q, together.q[place.right : place.right + 3 * place.columns], atol=1e-5, rtol=1e-5)


@compiled
@every_rank
def test_zeros_stay_zeros(rank: int) -> None:
    _, fast, slow = pair("mixed", rank, lambda numel, name: torch.zeros(numel))
    for each in (fast, slow):
        assert not each.out.any()
        assert not each.after.any()
        assert torch.isfinite(each.p).all()
    assert torch.equal(fast.p, slow.p)


@compiled
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2e38])
@pytest.mark.parametrize("place", [0, 8, 9, 488, 489, 909, -1])
@pytest.mark.parametrize("owed", [True, False])
def test_numbers_that_cannot_be_summed_are_refused(bad: float, place: int, owed: bool) -> None:
    factoring = factoring_of(MIXES["mixed"], 2)
    x = draws(sum(each.numel for each in factoring.places), "x")
    residual = Residual(torch.zeros_like(x), torch.empty_like(x)) if owed else None
    q = draws(factoring.right_numel, "q")
    compiled_loops.project(x, factoring, q, TERMS, residual)
    x[place] = bad
    for module in (compiled_loops, plain):
        with pytest.raises(NotFinite):
            module.project(x, factoring, q, TERMS, residual)


@compiled
def test_columns_that_add_nothing_become_the_same_units() -> None:
    factoring = factoring_of([(9, 40), (16, 40), (33, 40)], 4)
    first = draws(factoring.first_numel, "dead")
    for run in factoring.runs:
        thin = run.left(first)
        thin[..., 1] = 3 * thin[..., 0]
        thin[..., 2] = 0
    wanted = first.clone()
    plain.orthonormalize(factoring, wanted)
    compiled_loops.orthonormalize(factoring, first)
    assert torch.equal(first, wanted)
    for run in factoring.runs:
        (p,) = run.left(first)
        torch.testing.assert_close(p.T @ p, torch.eye(4), atol=1e-6, rtol=0)


def test_plain_torch_orthonormalizes_each_by_itself() -> None:
    factoring = factoring_of(MIXES["mixed"], 3)
    first = draws(factoring.first_numel, "first")
    parts = [first[each.left : each.left + 3 * each.rows].view(-1, 3).clone() for each in factoring.matrices]
    plain.orthonormalize(factoring, first)
    for each, part in zip(factoring.matrices, parts, strict=True):
        found = first[each.left : each.left + 3 * each.rows].view(-1, 3)
        assert torch.equal(found, orthonormal_columns([part])[0])


def test_neighbors_of_one_shape_are_multiplied_together() -> None:
    assert [len(run.places) for run in factoring_of(MIXES["alike"], 4).runs] == [5]
    assert [len(run.places) for run in factoring_of(MIXES["mixed"], 3).runs] == [1, 1, 2, 1]
    assert factoring_of(MIXES["none"], 4).runs == ()


@pytest.mark.parametrize("module", [compiled_loops, plain])
def test_a_kernel_with_other_strides_is_the_same_matrix(module: Any) -> None:
    """channels_last: what lies elsewhere comes to the same factors."""
    kernel = draws(6 * 5 * 3 * 3, "kernel").view(6, 5, 3, 3)
    other = kernel.contiguous(memory_format=torch.channels_last)
    plainly = factoring_of([(6, 5, 3, 3)], 2)
    strided = Factoring.of(2, [((6, 5, 3, 3), other.stride(), 0)], [True])
    memory = other.permute(0, 2, 3, 1).reshape(-1)
    q = draws(plainly.right_numel, "q")
    first = module.project(kernel.reshape(-1), plainly, q, TERMS)
    torch.testing.assert_close(module.project(memory, strided, q, TERMS), first)
    out = torch.empty_like(memory)
    module.expand(strided, first, q, out)
    whole = torch.empty_like(memory)
    module.expand(plainly, first, q, whole)
    assert torch.equal(out.as_strided(other.shape, other.stride()).reshape(-1), whole)
