"""What kernels are launched with makes their arithmetic that of plain torch."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="the extra gpu is not installed")
tl = triton.language

from gossamer.base.kernels.triton import launch  # noqa: E402


@triton.jit
def _quotient(x, y, out, length: tl.constexpr):
    place = tl.arange(0, length)
    tl.store(out + place, tl.div_rn(tl.load(x + place), tl.load(y + place)))


@pytest.mark.parametrize("scale", [1.0, 1e-38, 1e-42, 1e30])
def test_quotients_are_rounded_once(scale: float) -> None:
    x, y = torch.randn(2, 1024, generator=torch.Generator().manual_seed(1))
    x, y = x * scale, y.abs() + 0.5
    out = torch.empty(1024)
    _quotient[(1,)](x, y, out, length=1024, **launch.EXACT)
    assert torch.equal(out.view(torch.int32), (x / y).view(torch.int32))
    twin = torch.zeros(1024) if scale < 1e-40 else x * (1 / y)  # denormal numbers taken for zero; a product
    assert not torch.equal(out, twin)


@pytest.mark.parametrize(("entries", "warps"), [(8, 4), (2048, 4), (4096, 8), (2**14, 16)])
def test_a_thread_has_up_to_sixteen_entries_and_more_in_the_largest_tiles(entries: int, warps: int) -> None:
    assert launch.warps_for(entries) == warps
