"""Cosine transform: orthonormal, in blocks of two dimensions, and many matrices at once."""

from __future__ import annotations

from math import cos, inf, pi, prod, sqrt

import pytest
import torch
from torch import Tensor

from gossamer.base import rng
from gossamer.base.kernels.reference import dct as module
from gossamer.base.kernels.reference.dct import dct

SHAPES = [(12, 20), (1, 20), (8, 8), (6, 45), (0, 3), (1, 1), (130, 67), (8, 8), (1, 70), (8, 8)]


def draws(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, generator=rng.generator("cosines", n), dtype=dtype)


def basis(length: int) -> Tensor:
    """Entry by entry, as textbooks have it."""
    rows = [
        [sqrt((2 - (k == 0)) / length) * cos(pi * (2 * j + 1) * k / (2 * length)) for j in range(length)]
        for k in range(length)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def by_hand(matrix: Tensor, block: int) -> Tensor:
    out = torch.empty_like(matrix)
    for top in range(0, matrix.shape[0], block):
        for left in range(0, matrix.shape[1], block):
            part = matrix[top : top + block, left : left + block]
            out[top : top + block, left : left + block] = basis(part.shape[0]) @ part @ basis(part.shape[1]).T
    return out


@pytest.mark.parametrize("block", [2, 8, 64])
@pytest.mark.parametrize("at_once", [1, 300, 2**18])
def test_blocks_of_matrices(block: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", at_once)
    sizes = [prod(shape) for shape in SHAPES]
    x, out = draws(sum(sizes)), torch.empty(sum(sizes), dtype=torch.float64)
    assert dct(x, SHAPES, block, out)
    expected = [by_hand(part.view(shape), block).view(-1) for part, shape in zip(x.split(sizes), SHAPES, strict=True)]
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-12, rtol=0)
    over = x.clone()
    dct(over, SHAPES, block, over)
    assert torch.equal(over, out)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_the_way_back_keeps_numbers_and_norms(dtype: torch.dtype, tolerance: float) -> None:
    n = sum(prod(shape) for shape in SHAPES)
    x, there, back = draws(n, dtype), torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype)
    dct(x, SHAPES, 64, there)
    dct(there, SHAPES, 64, back, inverse=True)
    torch.testing.assert_close(back, x, atol=tolerance, rtol=0)
    assert float(there.double().norm() / x.double().norm()) == pytest.approx(1, abs=tolerance)


def test_one_block_by_hand() -> None:
    """(1, 3; 5, 7): sums and differences of halves."""
    out = torch.empty(4, dtype=torch.float64)
    dct(torch.tensor([1.0, 3, 5, 7], dtype=torch.float64), [(2, 2)], 8, out)
    torch.testing.assert_close(out, torch.tensor([8.0, -2, -4, 0], dtype=torch.float64), atol=1e-14, rtol=0)


def test_equal_shapes_at_equal_distances_are_one_run() -> None:
    layers = [(4, 6), (3, 5), (1, 6)] * 5
    assert module._runs(tuple(layers)) == ((0, 45, 5, (4, 6)), (24, 45, 5, (3, 5)), (39, 45, 5, (1, 6)))
    assert module._runs(((2, 2), (2, 2), (1, 1), (2, 2))) == ((0, 4, 2, (2, 2)), (9, 0, 1, (2, 2)), (8, 0, 1, (1, 1)))


def test_zeros_of_the_basis_are_zeros() -> None:
    """Else a sign of what is zero would be that of a rounding error."""
    out = torch.empty(3)
    dct(torch.tensor([0.0, 1, 0]), [(1, 3)], 64, out)
    assert float(out[1]) == 0.0


def test_a_value_that_is_not_finite_is_reported() -> None:
    x, out = draws(64), torch.empty(64, dtype=torch.float64)
    assert dct(x, [(8, 8)], 8, out)
    x[13] = inf
    assert not dct(x, [(8, 8)], 8, out)


def test_without_data() -> None:
    x = torch.empty(240, device="meta")
    assert dct(x, [(12, 20)], 8, torch.empty_like(x))


def test_cosines_of_another_kind_would_be_found() -> None:
    """DCT-IV, and a basis whose first row is too long."""
    places = torch.arange(8, dtype=torch.float64) + 0.5
    other = torch.cos(pi / 8 * places[:, None] * places) * 0.5
    long = basis(8)
    long[0] *= sqrt(2)
    x, out = draws(8), torch.empty(8, dtype=torch.float64)
    dct(x, [(1, 8)], 8, out)
    for wrong in (other, long):
        assert float((wrong @ x - out).abs().max()) > 0.1
