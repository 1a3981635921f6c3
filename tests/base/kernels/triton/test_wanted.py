"""What should travel is x and what is owed, rounded once, and its magnitudes order as they do."""

from __future__ import annotations

import math

import pytest
import torch

triton = pytest.importorskip("triton", reason="the extra gpu is not installed")
tl = triton.language

from gossamer.base.kernels.reference.residual import Residual  # noqa: E402
from gossamer.base.kernels.triton import wanted  # noqa: E402
from gossamer.base.kernels.triton.launch import EXACT  # noqa: E402

N = 30


@triton.jit
def _wanted(x, before, after, out, numel, tile: tl.constexpr):
    place = tl.arange(0, tile)
    w = wanted.wanted(x, before, place, place < numel)
    tl.store(out + place, w)
    wanted.store_residual(after, w - 1.0, place, place < numel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("owes", [False, True])
def test_numbers_are_widened_before_what_is_owed_is_added(dtype: torch.dtype, owes: bool) -> None:
    x, before, after = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    x, kept, out = x.to(dtype), after.clone(), torch.full((32,), torch.nan)
    residual = Residual(before, after) if owes else None
    _wanted[(1,)](wanted.raw(x), *wanted.tensors_of(residual), out, N, tile=32, **EXACT)
    truth = (x.float() + before if owes else x.float())[:N]
    assert torch.equal(out[:N], truth)
    assert not out[N:].any()
    assert torch.equal(after[:N], truth - 1 if owes else kept[:N])
    assert torch.equal(after[N:], kept[N:])
    if owes and dtype != torch.float32:  # the twin: added up in 16 bits
        assert not torch.equal(out[:N], (x + before.to(dtype)).float()[:N])


@triton.jit
def _magnitudes(x, out, tile: tl.constexpr):
    place = tl.arange(0, tile)
    tl.store(out + place, wanted.magnitude(tl.load(x + place)))


def test_magnitudes_order_as_numbers_without_their_sign_do() -> None:
    ascending = torch.tensor([0.0, -1e-45, 1e-38, -0.5, 1.0, -3e38, math.inf, -math.nan])
    found = torch.empty(8, dtype=torch.int32)
    _magnitudes[(1,)](ascending, found, tile=8, **EXACT)
    assert found.tolist() == sorted(set(found.tolist()))
    assert found[-2] == wanted.INFINITE.value
    _magnitudes[(1,)](torch.tensor([0.0, -0.0, 2.0, -2.0] * 2), found, tile=8, **EXACT)
    assert found[0] == found[1] == 0
    assert found[2] == found[3]
