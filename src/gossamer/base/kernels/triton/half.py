"""Half precision on a GPU: one pass to round and check, one to add any number of payloads up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference import half
from gossamer.base.kernels.triton.finite import largest_sendable
from gossamer.base.kernels.triton.launch import EXACT, serves, tiles
from gossamer.base.kernels.triton.stacking import fit, stacked
from gossamer.base.kernels.triton.status import OUT_OF_RANGE, expect_sendable, found, fresh, report
from gossamer.base.kernels.triton.wanted import raw, wanted, widened
from gossamer.errors import NotFinite

HALVES = (torch.bfloat16, torch.float16)
SHARE = 2048  # entries of a program


@triton.jit
def _half_encode(x, codes, status, numel, limit, tile: tl.constexpr):
    place = tl.program_id(0) * tile + tl.arange(0, tile)
    here = place < numel
    number = wanted(x, None, place, here)
    report(status, ~(tl.abs(number) <= limit), OUT_OF_RANGE)
    if codes.dtype.element_ty == tl.int16:  # bfloat16: its bits, rounded to the nearest, even one
        bits = number.to(tl.int32, bitcast=True)
        tl.store(codes + place, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16), mask=here)
    else:
        tl.store(codes + place, number.to(tl.float16), mask=here)


def half_encode(x: Tensor, dtype: torch.dtype, terms: int = 1) -> Tensor:
    """As reference.half.half_encode."""
    if dtype not in HALVES or not serves(x):
        return half.half_encode(x, dtype, terms)
    codes, status = torch.empty(x.shape, dtype=dtype, device=x.device), fresh(x.device)
    _half_encode[tiles(x.numel(), SHARE)](
        raw(x), raw(codes), status, x.numel(), largest_sendable(x.dtype, terms), tile=SHARE, **EXACT
    )
    if found(status):
        raise NotFinite("a number is not finite, or too large for the sum over the group")
    return codes


@triton.jit
def _half_sum(payloads, out, status, numel, step, count, divisor, tile: tl.constexpr):
    place = tl.program_id(0) * tile + tl.arange(0, tile)
    here = place < numel
    total = widened(tl.load(payloads + place, mask=here, other=0))
    for _ in range(1, count):
        payloads += step
        total += widened(tl.load(payloads + place, mask=here, other=0))
    total = tl.div_rn(total, divisor)
    expect_sendable(total, status)
    tl.store(out + place, total, mask=here)


def half_decode(payloads: Sequence[Tensor], out: Tensor, divisor: int = 1) -> bool:
    """As reference.half.half_decode."""
    dtype, numel = payloads[0].dtype, out.numel()
    kernel_serves = dtype in HALVES and fit(payloads, dtype, numel, out) and serves(out, types=(torch.float32,))
    if not kernel_serves:
        return half.half_decode(payloads, out, divisor)
    status, (rows, step) = fresh(out.device), stacked(payloads)
    counts = numel, step, len(payloads), float(divisor)
    _half_sum[tiles(numel, SHARE)](raw(rows), out, status, *counts, tile=SHARE, **EXACT)
    return not found(status)
