"""Ternary code: plus a scale, minus it, or nothing, right on average. Arithmetic as in quantize.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.base.kernels.reference.bits import pack, refuse, unpack
from gossamer.base.kernels.reference.counter_rng import BITS, paired
from gossamer.base.kernels.reference.residual import wanted
from gossamer.base.kernels.reference.segments import block_sums, expect, expect_numbers, per_tensor, sendable

BASE = {4: 4, 5: 3}  # by codes in a byte: two bits each, or base three up to 242
APART = {4: 1, 5: 64}  # and how far apart those are that share one


def magnitudes(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """The largest |x| of each tensor, 0 of an empty one: (tensors,) float32. Raises NotFinite."""
    spans = wanted(x, None).abs().split(list(sizes))
    found = [span.amax().view(1) if span.numel() else span.new_zeros(1) for span in spans]
    return sendable(torch.cat(found or [x.new_empty(0)]))


def squares(x: Tensor, sizes: Sequence[int], block: int) -> Tensor:
    """The sum of x^2 over each block, a power of two, by halves: (blocks,) float64, since squares leave float32's range
    long before the numbers do."""
    return block_sums(x.double().square(), sizes, block)


def ternary_encode(
    x: Tensor, sizes: Sequence[int], scales: Tensor, key: int, per_byte: int, after: Tensor | None = None
) -> Tensor:
    """Codes, `per_byte` (4 or 5) to a byte: 0, or where u s < |x| 1 for x > 0 and 2 for x < 0; 0 where s is.

    s is the tensor's scale, from scales: (tensors,) float32; u = paired(key) / 2^24. 1 decodes to s, 2 to -s. It is
    unbiased where |x| <= s. The residual of x is written to `after` if given, (n,) at least float32, which may be x.
    Raises NotFinite.

    Four neighbors share a byte, the first one lowest. Of five to a byte, those 64 apart do, in every 320 entries of a
    tensor: byte i has i, 64 + i, ... 256 + i, and loops make or read 64 bytes at once. In the rest neighbors do.
    """
    w = wanted(x, None)
    expect(scales, torch.float32, len(sizes))
    scale = per_tensor(scales, sizes).to(w.dtype)
    drawn = paired(key, len(w), w.device).float() * 2.0**-BITS
    sent = (drawn * scale < w.abs()) & (scale != 0)
    negative = w < 0
    if after is not None:
        after.copy_(w - torch.where(sent, torch.where(negative, -scale, scale), 0.0))
    codes = torch.where(sent, torch.where(negative, 2, 1), 0)
    return pack(_turned(codes, sizes, per_byte, APART[per_byte]), sizes, per_byte, BASE[per_byte])


def ternary_decode(
    payloads: Sequence[tuple[Tensor]],
    scales: Tensor,
    sizes: Sequence[int],
    per_byte: int,
    out: Tensor,
    divisor: int = 1,
) -> None:
    """Overwrite `out`: (n,) with the sum of the payloads' signs, an integer, times s, over `divisor`.

    Raises MalformedError before anything is written.
    """
    expect_numbers(scales, (len(sizes),), max(1, len(payloads)))
    total = torch.zeros(len(out), dtype=torch.int32, device=out.device)
    for (packed,) in payloads:
        codes = _turned(unpack(packed, sizes, per_byte, BASE[per_byte]), sizes, APART[per_byte], per_byte)
        refuse(codes == 3)
        total += (codes == 1).int() - (codes == 2).int()
    torch.mul(total.to(out.dtype), per_tensor(scales, sizes).to(out.dtype), out=out)
    if divisor != 1:
        out.div_(divisor)


def _turned(codes: Tensor, sizes: Sequence[int], rows: int, columns: int) -> Tensor:
    """Transpose every whole matrix of codes in a tensor, (rows, columns); the remainder is unchanged."""
    found = [codes.new_empty(0)]
    for span in codes.split(list(sizes)):
        whole = len(span) - len(span) % (rows * columns)
        found += [span[:whole].view(-1, rows, columns).transpose(1, 2).reshape(-1), span[whole:]]
    return torch.cat(found)
