"""Decoding: payloads of numbers and codes of blocks, checked in a small pass and then added up in one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference.finite import summing_terms
from gossamer.base.kernels.triton.code_format import CodeFormat
from gossamer.base.kernels.triton.finite import largest_sendable
from gossamer.base.kernels.triton.launch import serves
from gossamer.base.kernels.triton.packing import load_codes, rest_of_byte
from gossamer.base.kernels.triton.rows import first_byte_of, located
from gossamer.base.kernels.triton.stacking import fit, stacked
from gossamer.base.kernels.triton.status import MALFORMED, found, fresh, report
from gossamer.base.kernels.triton.tiling import halved, tileable, tiling_of


@triton.jit
def _wrong(
    scales, codes, status, starts, lengths, first_bytes, blocks, scale_step, code_step, limit, hole: tl.constexpr,
    bits: tl.constexpr, width: tl.constexpr, most: tl.constexpr,
    block: tl.constexpr, together: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    """Report invalid values of one of the concatenated payloads, the second number of a program."""
    row, live, length, _, here = located(starts, lengths, blocks, block, together, even)
    payload = tl.program_id(1).to(tl.int64)
    for each in tl.static_range(width):
        number = tl.load(scales + payload * scale_step + row * width + each, mask=live, other=0.0)
        report(status, ~(tl.abs(number) <= limit), MALFORMED)
    if bits < 8 or most > 0:
        packed, first_byte = codes + payload * code_step, first_byte_of(first_bytes, row, live, bits, even)
        report(status, rest_of_byte(packed, first_byte, length, live, bits) != 0, MALFORMED)
        if most > 0:
            code = load_codes(packed, first_byte[:, None], tl.arange(0, block)[None, :], here, bits)
            report(status, (code > most) | (code == hole), MALFORMED)


@triton.jit
def _sum(
    scales, codes, out, starts, lengths, first_bytes, blocks, scale_step, code_step, payloads, divisor,
    meant: tl.constexpr, bits: tl.constexpr, width: tl.constexpr, most: tl.constexpr,
    block: tl.constexpr, together: tl.constexpr, even: tl.constexpr,
):  # fmt: skip
    row, live, _, place, here = located(starts, lengths, blocks, block, together, even)
    first_byte, within = first_byte_of(first_bytes, row, live, bits, even)[:, None], tl.arange(0, block)[None, :]
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
    form: CodeFormat,
    payloads: Sequence[tuple[Tensor, Tensor]],
    sizes: Sequence[int],
    block: int,
    out: Tensor,
    divisor: int,
) -> bool:
    """Overwrite `out` with the sum over `divisor`. Return False, without
    writing, if plain torch has to decode or to report an error."""
    scales, codes = [first for first, _ in payloads], [second for _, second in payloads]
    numel = form.numel(sizes, block)
    fits = fit(scales, torch.float32, numel[0], out) and fit(codes, form.dtype, numel[1], out)
    if not (payloads and halved(block) and fits and tileable(sizes, out) and serves(out, types=(torch.float32,))):
        return False
    tiling, status = tiling_of(sizes, block, form.bits, out.device), fresh(out.device)
    (numbers, scale_step), (packed, code_step) = stacked(scales), stacked(codes)
    limit = largest_sendable(torch.float32, summing_terms(torch.float32, len(payloads)))
    steps, named = (scale_step, code_step), {**form.named, **tiling.shape}
    _wrong[(*tiling.grid, len(payloads))](
        numbers, packed, status, *tiling.places, *steps, limit, hole=form.hole, **named
    )
    if found(status):
        return False
    args = numbers, packed, out, *tiling.places, *steps, len(payloads), float(divisor)
    _sum[tiling.grid](*args, meant=form.meant, **named)
    return True
