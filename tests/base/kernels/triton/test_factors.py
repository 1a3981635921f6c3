"""Thin factors on a GPU: what all workers compute alike has the bits of plain torch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the extra gpu is not installed")

from gossamer.base.kernels.reference import low_rank as truth
from gossamer.base.kernels.reference.low_rank import Factoring
from gossamer.base.kernels.reference.residual import Residual
from gossamer.base.kernels.triton import factors
from gossamer.errors import NotFinite

TERMS = 1024.0
Shapes = list[tuple[int, ...]]
MIXES: dict[str, Shapes] = {
    "one": [(25, 40)],
    "alike": [(25, 40)] * 3,
    "mixed": [(9,), (12, 40), (0,), (30, 14), (10, 4, 3, 3), (10, 4, 3, 3), (5, 0), (1,), (64, 16)],
    "none": [(40,), (0,), (7,)],
    "empty": [],
}
every_mix = pytest.mark.parametrize("mix", MIXES)
every_rank = pytest.mark.parametrize("rank", [1, 2, 5])


def factoring_of(shapes: Shapes, rank: int) -> Factoring:
    tensors, at = [], 0
    for shape in shapes:
        tensors.append((shape, torch.empty(shape, device="meta").stride(), at))
        at += math.prod(shape)
    cut = [len(shape) > 1 and math.prod(shape) > 0 and shape[0] >= rank for shape in shapes]
    return Factoring.of(rank, tensors, cut)


def draws(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def numel_of(factoring: Factoring) -> int:
    return sum(place.numel for place in factoring.places)


def test_buffers_of_more_than_two_to_the_31_entries_are_left_to_plain_torch() -> None:
    factoring = factoring_of([(2**16, 2**15), (8, 8)], rank=1)
    first, q, out = (
        torch.empty(numel, device="meta") for numel in (factoring.first_numel, factoring.right_numel, 2**31 + 64)
    )
    factors.expand(factoring, first, q, out)
    assert factors.project(out, factoring, q, TERMS).shape == first.shape


@every_mix
@every_rank
def test_products_and_what_they_leave(mix: str, rank: int) -> None:
    factoring = factoring_of(MIXES[mix], rank)
    first, q = draws(factoring.first_numel, 1), draws(factoring.right_numel, 2)
    found, due = (torch.full((numel_of(factoring),), 7.0) for _ in range(2))
    factors.expand(factoring, first, q, found)
    truth.expand(factoring, first, q, due)
    assert same_bits(found, due)
    w = draws(numel_of(factoring), 3)
    mine, theirs = w.clone(), w.clone()  # what is left is written over w
    assert same_bits(
        factors.back_project(mine, factoring, first, mine), truth.back_project(theirs, factoring, first, theirs)
    )
    assert same_bits(mine, theirs)
    assert same_bits(factors.back_project(w, factoring, first), truth.back_project(w, factoring, first))


def test_the_check_sees_products_in_another_order() -> None:
    factoring = factoring_of(MIXES["one"], 5)
    first, q = draws(factoring.first_numel, 1), draws(factoring.right_numel, 2)
    found = torch.empty(1000)
    factors.expand(factoring, first, q, found)
    p, (run,) = first.view(25, 5), factoring.runs
    turned = torch.stack([p[:, k : k + 1] * run.right(q)[0, :, k] for k in reversed(range(5))])
    backwards = turned[0]
    for term in turned[1:]:
        backwards = backwards + term
    torch.testing.assert_close(found, backwards.view(-1), rtol=0, atol=1e-5)
    assert not same_bits(found, backwards.view(-1))


@every_mix
@pytest.mark.parametrize("mode", ["nothing owed", "apart", "in place"])
def test_projections(mix: str, mode: str) -> None:
    factoring = factoring_of(MIXES[mix], 3)
    n, q = numel_of(factoring), draws(factoring.right_numel, 2)
    firsts, afters = [], []
    for module in (factors, truth):
        before = draws(n, 4)
        after = before if mode == "in place" else torch.full((n,), 7.0)
        owed = None if mode == "nothing owed" else Residual(before, after)
        firsts.append(module.project(draws(n, 3), factoring, q, TERMS, owed))
        afters.append(after)
    assert same_bits(*firsts)
    assert same_bits(*afters)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38 / TERMS * 2])
@pytest.mark.parametrize("place", [0, 100, 1600])
def test_what_could_leave_its_range_is_refused(bad: float, place: int) -> None:
    factoring = factoring_of(MIXES["mixed"], 3)
    x, q = draws(numel_of(factoring), 3), draws(factoring.right_numel, 2)
    x[place] = bad
    for owed in (None, Residual(torch.zeros_like(x), torch.empty_like(x))):
        with pytest.raises(NotFinite):
            factors.project(x, factoring, q, TERMS, owed)


@pytest.mark.parametrize("kind", ["float64", "other strides"])
def test_others_are_served_by_plain_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a kernel was started")

    for name in ("_weigh", "_expand"):
        monkeypatch.setattr(factors, name, refuse)
    other = torch.empty(6, 5, 3, 3).contiguous(memory_format=torch.channels_last)
    factoring = factoring_of([(6, 5, 3, 3)], 2)
    dtype = torch.float64 if kind == "float64" else torch.float32
    if kind == "other strides":
        factoring = Factoring.of(2, [(tuple(other.shape), other.stride(), 0)], [True])
    x, q = draws(270, 1).to(dtype), draws(factoring.right_numel, 2).to(dtype)
    left, out = torch.empty_like(x), torch.empty_like(x)
    first = factors.project(x, factoring, q, TERMS)
    second = factors.back_project(x, factoring, first, left)
    factors.expand(factoring, first, second, out)
    torch.testing.assert_close(left + out, x, rtol=0, atol=1e-4)
