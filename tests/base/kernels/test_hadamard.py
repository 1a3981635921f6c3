"""Walsh-Hadamard transform: orthonormal, its own way back, and compiled loops to the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.base import rng
from gossamer.base.kernels import hadamard as native
from gossamer.base.kernels import library
from gossamer.base.kernels.reference import hadamard as reference

MODULES = [reference.hadamard, native]
every_way = pytest.mark.parametrize("transform", MODULES, ids=["plain", "compiled"])
compiled = pytest.mark.skipif(not library.LIBRARY.exists(), reason="the compiled loops were not built")
BLOCKS = [1, 2, 4, 8, 16, 32, 64, 128, 512, 1024, 2048, 16384]


def draws(n: int, name: object, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=rng.generator("rotations", str(name)), dtype=dtype)


def signs(block: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.where(draws(block, "signs") < 0, -1.0, 1.0).to(dtype)


def matrix(block: int) -> Tensor:
    """H by Sylvester's rule: the entry is 1 where the places have an even number of bits in common."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)]).double()


@every_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_the_product_with_a_matrix(transform: Any, dtype: torch.dtype) -> None:
    sizes, block = [40, 0, 16, 7], 16  # 16 + 16 + 8, nothing, 16, 4 + 2 + 1
    x, out, s = draws(63, "matrix", dtype), torch.empty(63, dtype=dtype), signs(block, dtype)
    assert transform(x, sizes, block, s, out)
    pieces = [(0, 16), (16, 16), (32, 8), (40, 16), (56, 4), (60, 2), (62, 1)]
    expected = [matrix(m) @ (s[:m].double() * x[at : at + m].double()) / m**0.5 for at, m in pieces]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=tolerance, rtol=0)


def test_one_block_by_hand() -> None:
    """(1, 2, 3, 4), signs (1, -1, 1, 1): 1, -2, 3, 4 -> -1, 3, 7, -1 -> 6, 2, -8, 4 -> half of it."""
    x, out = torch.tensor([1.0, 2, 3, 4]), torch.empty(4)
    native(x, [4], 4, torch.tensor([1.0, -1, 1, 1]), out)
    assert out.tolist() == [3.0, 1.0, -4.0, 2.0]


@compiled
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_compiled_loops_come_to_the_same_bits(block: int, inverse: bool) -> None:
    for sizes in ([3 * block + 37, 1, 0, 5, 4097, 64], [block], [], [0], [2**19 + 1]):
        x, s = draws(sum(sizes), sizes), signs(block)
        plain, fast, over = torch.full_like(x, nan), torch.full_like(x, nan), x.clone()
        reference.hadamard(x, sizes, block, s, plain, inverse=inverse)
        native(x, sizes, block, s, fast, inverse=inverse)
        native(over, sizes, block, s, over, inverse=inverse)
        assert torch.equal(fast.view(torch.int32), plain.view(torch.int32))
        assert torch.equal(over.view(torch.int32), plain.view(torch.int32))


@compiled
def test_numbers_that_lie_anywhere() -> None:
    x, s = draws(2**19 + 100, "anywhere"), signs(64)
    for start in (1, 5, 9):
        part = x[start : start + 2**19]
        plain, fast = torch.empty(2**19), torch.empty(2**19 + 9)[start : start + 2**19]
        reference.hadamard(part, [2**19], 64, s, plain)
        native(part, [2**19], 64, s, fast)
        assert torch.equal(fast, plain)


@every_way
@pytest.mark.parametrize("block", BLOCKS)
def test_the_way_back(transform: Any, block: int) -> None:
    sizes = [2 * block + 11, 3]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 4e-6)):
        x, s = draws(sum(sizes), block, dtype), signs(block, dtype)
        there, back = torch.empty_like(x), torch.empty_like(x)
        transform(x, sizes, block, s, there)
        transform(there, sizes, block, s, back, inverse=True)
        torch.testing.assert_close(back, x, atol=tolerance, rtol=0)
        for a, b in zip(x.split(sizes), there.split(sizes), strict=True):
            assert float(b.double().norm() / a.double().norm()) == pytest.approx(1, abs=tolerance)


@every_way
@pytest.mark.parametrize("block", [4, 16, 64, 256, 1024])
def test_integers_go_and_come_back_exactly_in_blocks_of_a_power_of_four(transform: Any, block: int) -> None:
    x = torch.randint(-1000, 1000, (4 * block,), generator=rng.generator("whole", block)).float()
    there, back, s = torch.empty_like(x), torch.empty_like(x), signs(block)
    transform(x, [len(x)], block, s, there)
    transform(there, [len(x)], block, s, back, inverse=True)
    assert torch.equal(back, x)
    transform(x, [len(x)], 2 * block, signs(2 * block), there)
    transform(there, [len(x)], 2 * block, signs(2 * block), back, inverse=True)
    assert not torch.equal(back, x)  # its scale, the root of a half, is rounded


@every_way
@pytest.mark.parametrize("inverse", [False, True])
def test_a_value_that_is_not_finite_is_reported(transform: Any, inverse: bool) -> None:
    for place in (0, 63, 64, 129):
        for number in (inf, -inf, nan):
            x = draws(130, "told")
            assert transform(x, [130], 64, signs(64), torch.empty(130), inverse=inverse)
            x[place] = number
            assert not transform(x, [130], 64, signs(64), torch.empty(130), inverse=inverse)
    assert not transform(torch.full((64,), 3e38), [64], 64, torch.ones(64), torch.empty(64), inverse=inverse)


@pytest.mark.parametrize("like", [torch.float64, "meta"], ids=str)
def test_what_is_not_served_comes_to_the_same(like: Any) -> None:
    x = draws(70, "other").to(like)
    out = torch.empty_like(x)
    assert native(x, [70], 32, signs(32).to(x), out)
    if not x.is_meta:
        plain = torch.empty_like(x)
        reference.hadamard(x, [70], 32, signs(32, torch.float64), plain)
        assert torch.equal(out, plain)


# -- the broken twins --------------------------------------------------------------------------------------------------


def unsigned(x: Tensor, sizes: Sequence[int], block: int, signs: Tensor, out: Tensor, *, inverse: bool = False) -> bool:
    return native(x, sizes, block, torch.ones_like(signs), out, inverse=inverse)


def test_signs_are_what_helps_against_a_row_of_the_matrix() -> None:
    """A row of H is what H alone turns into one single spike; random signs turn it into noise."""
    row, out = matrix(64)[37].float(), torch.empty(64)
    unsigned(row, [64], 64, signs(64), out)
    assert float(out.abs().max()) == 8.0
    native(row, [64], 64, signs(64), out)
    assert float(out.abs().max()) < 4.0


def test_a_way_back_without_signs_would_be_found() -> None:
    x, there, back = draws(64, "back"), torch.empty(64), torch.empty(64)
    native(x, [64], 64, signs(64), there)
    unsigned(there, [64], 64, signs(64), back, inverse=True)
    assert float((back - x).abs().max()) > 0.1
