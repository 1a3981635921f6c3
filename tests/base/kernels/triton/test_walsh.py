"""Walsh-Hadamard transform on a GPU: the bits of plain torch."""

from __future__ import annotations

from math import inf, nan, sqrt

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the extra gpu is not installed")

from gossamer.base.kernels.reference import hadamard as truth
from gossamer.base.kernels.triton import walsh as fast


def draws(n: int, seed: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def signs(block: int) -> Tensor:
    return torch.where(draws(block, 1) < 0, -1.0, 1.0)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("block", [1, 2, 4, 64, 1024, 2**14])
def test_it_has_the_bits_of_plain_torch(block: int, inverse: bool) -> None:
    for sizes in ([3 * block + 37 % block, 1, 0, 5, 65], [block], [], [0]):
        x, s = draws(sum(sizes), 2), signs(block)
        x[::5], x[1::5] = -0.0, 1e-42
        due, found, over = torch.full_like(x, nan), torch.full_like(x, nan), x.clone()
        assert truth.hadamard(x, sizes, block, s, due, inverse=inverse)
        assert fast.hadamard(x, sizes, block, s, found, inverse=inverse)
        assert fast.hadamard(over, sizes, block, s, over, inverse=inverse)
        assert same_bits(found, due)
        assert same_bits(over, due)


def test_the_check_sees_levels_in_another_order() -> None:
    x, s, found = draws(1024, 3), signs(1024), torch.empty(1024)
    fast.hadamard(x, [1024], 1024, s, found)
    rows, distance = x * s * (1 / sqrt(1024)), 512
    while distance:
        first, second = rows.view(-1, 2, distance).unbind(1)
        rows, distance = torch.stack([first + second, first - second], 1).view(-1), distance // 2
    torch.testing.assert_close(found, rows)
    assert not same_bits(found, rows)


@pytest.mark.parametrize("bad", [nan, inf, -inf, 3e38])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what is tested
def test_a_value_that_is_not_finite_is_reported(bad: float) -> None:
    x = torch.full((70,), 1.0)
    x[40:42] = bad
    for sizes in ([70], [40, 30]):
        out, due = torch.empty(70), torch.empty(70)
        assert fast.hadamard(x, sizes, 4, torch.ones(4), out) == truth.hadamard(x, sizes, 4, torch.ones(4), due)
        torch.testing.assert_close(out, due, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "block"), [(torch.float64, 16), (torch.bfloat16, 16), (torch.float32, 2**15)])
def test_others_are_served_by_plain_torch(dtype: torch.dtype, block: int) -> None:
    x, s = draws(2**15 + 9, 4).to(dtype), signs(block).to(dtype)
    due, found = torch.empty_like(x), torch.empty_like(x)
    truth.hadamard(x, [len(x)], block, s, due)
    fast.hadamard(x, [len(x)], block, s, found)
    assert torch.equal(found, due)
