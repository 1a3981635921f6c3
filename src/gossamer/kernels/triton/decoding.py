"""Decoding: payloads of scales and codes of blocks, checked in a small pass and then added up in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.reference.finite import summing_terms
from gossamer.kernels.reference.segments import blocks
from gossamer.kernels.triton.launch import serves
from gossamer.kernels.triton.packing import load_codes, rest_of_byte
from gossamer.kernels.triton.rows import located
from gossamer.kernels.triton.stacking import fit, stacked
from gossamer.kernels.triton.status import MALFORMED, found, fresh, report
from gossamer.kernels.triton.tiling import halved, tileable, tiling_of

WRONG: tl.constexpr = tl.constexpr(MALFORMED)


@dataclass(frozen=True)
class Format:
    """What codes are, and stand for."""

    meant: Any  # within a kernel: (code, first, second number of its block, most) -> float32
    dtype: torch.dtype
    bits: int
    width: int = 1  # float32 numbers of a block
    most: int = 0  # the largest code; 0 where all are codes
    hole: int = -1  # a code below it that no encoder writes


@triton.jit
def _wrong(
    scales,
    codes,
    status,
    starts,
    lengths,
    first_bytes,
    blocks,
    scale_step,
    code_step,
    limit,
    bits: tl.constexpr,
    width: tl.constexpr,
    most: tl.constexpr,
    hole: tl.constexpr,
    block: tl.constexpr,
    together: tl.constexpr,
    even: tl.constexpr,
):
    """Report what one payload, of those side by side, should not hold: the second number of a program is its."""
    row, live, length, _, here = located(starts, lengths, blocks, block, together, even)
    payload = tl.program_id(1).to(tl.int64)
    for each in tl.static_range(width):
        number = tl.load(scales + payload * scale_step + row * width + each, mask=live, other=0.0)
        report(status, ~(tl.abs(number) <= limit), WRONG)
    if bits < 8 or most > 0:
        packed, first = codes + payload * code_step, tl.load(first_bytes + row, mask=live, other=0)
        report(status, rest_of_byte(packed, first, length, live, bits) != 0, WRONG)
        if most > 0:
            code = load_codes(packed, first[:, None], tl.arange(0, block)[None, :], here, bits)
            report(status, tl.max(((code > most) | (code == hole)).to(tl.int32), 1), WRONG)


@triton.jit
def _sum(
    scales,
    codes,
    out,
    starts,
    lengths,
    first_bytes,
    blocks,
    scale_step,
    code_step,
    payloads,
    divisor,
    meant: tl.constexpr,
    bits: tl.constexpr,
    width: tl.constexpr,
    most: tl.constexpr,
    block: tl.constexpr,
    together: tl.constexpr,
    even: tl.constexpr,
):
    row, live, _, place, here = located(starts, lengths, blocks, block, together, even)
    aligned: tl.constexpr = even * bits // 8 if even * bits >= 8 else 1  # every block's first byte is a multiple of it
    within = tl.arange(0, block)[None, :]
    first_byte = tl.multiple_of(tl.load(first_bytes + row, mask=live, other=0), aligned)[:, None]
    total = tl.zeros((together, block), tl.float32)
    for _ in range(payloads):
        first = tl.load(scales + row * width, mask=live, other=0.0)
        second = tl.load(scales + row * width + width - 1, mask=live, other=0.0)
        code = load_codes(codes, first_byte, within, here, bits)
        total += meant(code, first[:, None], second[:, None], most)
        scales += scale_step
        codes += code_step
    tl.store(out + place, tl.div_rn(total, divisor), mask=here)


def decoded(
    form: Format,
    payloads: Sequence[tuple[Tensor, Tensor]],
    sizes: Sequence[int],
    block: int,
    out: Tensor,
    divisor: int,
) -> bool:
    """Overwrite `out` with the sum over `divisor`. False, and nothing is written, where plain torch has to do it, or to
    say what is wrong."""
    scales, codes = [first for first, _ in payloads], [second for _, second in payloads]
    counts = form.width * blocks(sizes, block), blocks([size * form.bits for size in sizes], 8)
    fits = fit(scales, torch.float32, counts[0], out) and fit(codes, form.dtype, counts[1], out)
    if not (payloads and halved(block) and fits and tileable(sizes, out) and serves(out, types=(torch.float32,))):
        return False
    tiling, status = tiling_of(sizes, block, form.bits, out.device), fresh(out.device)
    numbers, scale_step = stacked(scales)
    packed, code_step = stacked(codes)
    limit = torch.finfo(torch.float32).max / summing_terms(torch.float32, len(payloads))
    named = {"bits": form.bits, "width": form.width, "most": form.most, **tiling.shape}
    steps = scale_step, code_step
    _wrong[(*tiling.grid, len(payloads))](
        numbers, packed, status, *tiling.places, *steps, limit, hole=form.hole, **named
    )
    if found(status):
        return False
    said = numbers, packed, out, *tiling.places, *steps, len(payloads), float(divisor)
    _sum[tiling.grid](*said, meant=form.meant, **named)
    return True
