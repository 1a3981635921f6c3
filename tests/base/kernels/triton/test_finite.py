"""Range checks on a GPU answer as plain torch does."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="the extra gpu is not installed")

from gossamer.base.kernels.reference import finite as truth
from gossamer.base.kernels.triton import finite

MAX = torch.finfo(torch.float32).max


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 7, 1024, 5000])
@pytest.mark.parametrize("wrong", [None, math.nan, math.inf, -math.inf, MAX / 2, -MAX, 1e-42])
def test_what_cannot_be_added_up_is_found(dtype: torch.dtype, numel: int, wrong: float | None) -> None:
    x = torch.ones(numel, dtype=dtype)
    if wrong is not None and numel:
        x[numel - 1] = wrong
    for terms in (1, 4):
        assert finite.within_range(x, terms) == truth.within_range(x, terms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("terms", [3, 7, 4096])
def test_the_limit_is_that_of_the_type(dtype: torch.dtype, terms: int) -> None:
    edge = torch.tensor([torch.finfo(dtype).max / terms], dtype=dtype)
    up, down = torch.full_like(edge, torch.inf), torch.zeros_like(edge)
    for x in (edge, torch.nextafter(edge, up), torch.nextafter(edge, down)):
        assert finite.within_range(x, terms) == truth.within_range(x, terms)
