"""Orthonormal columns on a GPU: the bits of plain torch, whatever stands beside a matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the extra gpu is not installed")

from gossamer.base.kernels.reference import low_rank as truth
from gossamer.base.kernels.reference.low_rank import Factoring
from gossamer.base.kernels.triton import factors as fast

ROWS = [5, 300, 17, 64, 5, 8, 1000]


def factoring_of(rows: list[int], rank: int) -> Factoring:
    tensors = [((each, 2), (2, 1), 2 * sum(rows[:i])) for i, each in enumerate(rows)]
    return Factoring.of(rank, [*tensors, ((9,), (1,), 2 * sum(rows))], [True] * len(rows) + [False])


def draws(factoring: Factoring, seed: int = 0) -> Tensor:
    return torch.randn(factoring.first_numel, generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def check(factoring: Factoring, first: Tensor) -> Tensor:
    found, due = first.clone(), first.clone()
    fast.orthonormalize(factoring, found)
    truth.orthonormalize(factoring, due)
    assert same_bits(found, due)
    return found


@pytest.mark.parametrize("rank", [1, 2, 5])
@pytest.mark.parametrize("rows", [ROWS, [5], [8], [64, 64, 64]], ids=str)
def test_columns_have_the_bits_of_plain_torch(rows: list[int], rank: int) -> None:
    factoring = factoring_of(rows, rank)
    check(factoring, draws(factoring))
    check(factoring, draws(factoring) * 1e-30)


def test_the_smallest_matrices() -> None:
    for rows in ([1], [1, 2, 3]):
        factoring = factoring_of(rows, 1)
        check(factoring, draws(factoring))


@pytest.mark.parametrize("kind", ["zeros", "twice", "last zero", "nearly twice", "-0.0"])
def test_dead_and_dependent_columns(kind: str) -> None:
    factoring = factoring_of([64, 7, 300], 4)
    first = draws(factoring)
    for run in factoring.runs:
        for p in run.left(first):
            if kind == "zeros":
                p.zero_()
            elif kind == "twice":
                p[:, 2] = p[:, 0] * 3
            elif kind == "nearly twice":
                p[:, 2] = p[:, 0] + 1e-7 * p[:, 3]
            elif kind == "-0.0":
                p[:] = torch.where(p < 0.5, -0.0, p)
            else:
                p[:, 3] = 0
    found = check(factoring, first)
    for run in factoring.runs:
        for p in run.left(found):
            torch.testing.assert_close(p.T @ p, torch.eye(4), atol=1e-5, rtol=0)


def test_the_limit_of_what_is_dead_is_that_of_plain_torch() -> None:
    """The second column is 1e-10 rounded to float32, which is more than 1e-10: it lives, and is no unit outside."""
    factoring = factoring_of([4], 2)
    first = torch.zeros(8 + 9)
    first[:2], first[5] = 1.0, 1e-10
    assert float(first[5]) > 1e-10
    assert check(factoring, first)[1:8:2].tolist() == [0.0, 0.0, 1.0, 0.0]
    first[5] = first[5].nextafter(torch.tensor(0.0))
    assert check(factoring, first)[1:8:2].tolist() == [0.0, 1.0, 0.0, 0.0]


def test_matrices_that_no_program_holds_go_to_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "MOST_ROWS", 64)
    factoring = factoring_of(ROWS, 3)
    check(factoring, draws(factoring))


def test_the_check_sees_sums_in_another_order() -> None:
    """What is left of a column that rounding alone keeps from another one's span: sums' last bits become its first."""
    factoring = factoring_of([1000], 2)
    first = draws(factoring)
    p = first[:2000].view(1000, 2)
    p[:, 1] = p[:, 0] * 3
    found = check(factoring, first)[:2000].view(1000, 2)
    one, two = p.double().unbind(1)
    one = one / one.square().cumsum(0)[-1].sqrt()
    two = two - one * (one * two).cumsum(0)[-1]
    two = (two / two.square().cumsum(0)[-1].sqrt()).float()
    torch.testing.assert_close(found[:, 1], two, rtol=0, atol=1e-6)
    assert not same_bits(found[:, 1], two)


def test_factors_that_are_wider_than_tall_go_to_plain_torch() -> None:
    factoring = factoring_of([8], 1)
    check(factoring, draws(factoring))
    check(factoring_of([], 1), torch.ones(9))
