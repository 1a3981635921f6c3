"""Sums within Triton kernels have the bits of plain torch."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="the extra gpu is not installed")
tl = triton.language

from gossamer.base.kernels.reference.gram_schmidt import sum_of_halves  # noqa: E402
from gossamer.base.kernels.triton import rows  # noqa: E402
from gossamer.base.kernels.triton.launch import EXACT  # noqa: E402


@triton.jit
def _sums(x, y, count: tl.constexpr, length: tl.constexpr):
    row = tl.arange(0, count)
    tl.store(y + row, rows.row_sums(tl.load(x + row[:, None] * length + tl.arange(0, length)[None, :])))


@pytest.mark.parametrize(("count", "length"), [(1, 1), (4, 2), (2, 8), (8, 256), (1, 2**14)])
def test_sums_are_taken_by_halves(count: int, length: int) -> None:
    x, y = torch.randn(count, length, generator=torch.Generator().manual_seed(length)), torch.empty(count)
    _sums[(1,)](x, y, count=count, length=length, **EXACT)
    assert torch.equal(y, sum_of_halves(x[:, :, None]).view(count))
    if length >= 256:  # the twin: another order
        assert not torch.equal(y, x.cumsum(1)[:, -1])


@triton.jit
def _means(x, count, y, length: tl.constexpr):
    row = tl.arange(0, 4)
    number = tl.load(x + row[:, None] * length + tl.arange(0, length)[None, :])
    tl.store(y + row, rows.row_means(number, tl.load(count + row)))


def test_means_are_of_those_that_count() -> None:
    x, y = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)), torch.empty(4)
    count = torch.tensor([8, 7, 1, 0], dtype=torch.int32)
    x[torch.arange(8)[None, :] >= count[:, None]] = 0.0
    _means[(1,)](x, count, y, length=8, **EXACT)
    assert torch.equal(y[:3], sum_of_halves(x[:, :, None]).view(4)[:3] / count[:3])
    assert y[3] == 0
    assert not torch.equal(y[:3], sum_of_halves(x[:, :, None]).view(4)[:3] / 8)  # the twin: of all
