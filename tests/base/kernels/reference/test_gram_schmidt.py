"""The inner loops against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gossamer.base.kernels import all_finite, within_range
from gossamer.base.kernels.reference.gram_schmidt import orthonormal_columns


def factors(rank: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, rank, generator=generator) for rows in (300, 17, 64, 5)]


def test_orthonormal_columns_span_the_same() -> None:
    for p, found in zip(factors(), orthonormal_columns(factors()), strict=True):
        torch.testing.assert_close(found.T @ found, torch.eye(4), atol=1e-5, rtol=0)
        torch.testing.assert_close(found @ (found.T @ p), p, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rank", [1, 3])
def test_dead_and_dependent_columns_become_units(rank: int) -> None:
    (found,) = orthonormal_columns([torch.zeros(9, rank)])
    torch.testing.assert_close(found.T @ found, torch.eye(rank), atol=1e-6, rtol=0)
    twice = torch.randn(9, 1, generator=torch.Generator().manual_seed(1)).repeat(1, rank)
    (found,) = orthonormal_columns([twice])
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.T @ found, torch.eye(rank), atol=1e-5, rtol=0)


def test_bits_do_not_depend_on_threads_or_company() -> None:
    before = torch.get_num_threads()
    wide = [torch.randn(30_000, 4, generator=torch.Generator().manual_seed(2)), *factors()]
    try:
        torch.set_num_threads(1)
        one = orthonormal_columns(wide)
        torch.set_num_threads(2)
        two = orthonormal_columns(wide)
    finally:
        torch.set_num_threads(before)
    alone = [orthonormal_columns([factor])[0] for factor in wide]
    for a, b, c in zip(one, two, alone, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 2e38])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_range(bad: float, place: int) -> None:
    x = torch.randn(1000)
    assert within_range(x, 4)
    x[place] = bad
    assert not within_range(x, 4)
    assert all_finite(x) == (bad == 2e38)
    assert within_range(torch.zeros(0), 4)
    assert within_range(torch.full((3,), 1e38), 2)


def test_a_sum_that_overflows_is_still_finite() -> None:
    assert all_finite(torch.full((10,), 3e38))
