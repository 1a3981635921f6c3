"""Float4: every entry as a sign and a power of two, in four bits. w = x + residual.before, or x.

Arithmetic as in quantize.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gossamer.base.kernels.reference.bits import pack, refuse, unpack
from gossamer.base.kernels.reference.residual import Residual, wanted
from gossamer.base.kernels.reference.segments import average, block_maxima, blocks, expect_numbers, sendable, spread

MINUS = 8  # added to the code of a negative value; alone it would be a second zero
MAGNITUDES = (0.0, *(2.0 ** (exponent - 7) for exponent in range(1, 8)))
MIDPOINTS = tuple((a + b) / 2 for a, b in pairwise(MAGNITUDES))


def float4_encode(
    x: Tensor, sizes: Sequence[int], block: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """(scales, codes): (blocks,) float32 and uint8, two entries to a byte.

    s = max |w| over a block. A code is the index in MAGNITUDES nearest to |w| / s (of two, the larger), 0
    where s is, and 8 more where w < 0, but for zero. It decodes to its magnitude times s, with its sign. Raises
    NotFinite.
    """
    w = wanted(x, residual)
    scales = sendable(block_maxima(w.abs(), sizes, block))
    scale = spread(scales, sizes, block).to(w.dtype)
    # In float64 no quotient of two float32 numbers is rounded onto a midpoint or across one.
    ratio = w.double().abs() / torch.where(scale == 0, torch.ones_like(scale), scale).double()
    midpoints = torch.tensor(MIDPOINTS, dtype=torch.float64, device=w.device)
    exponents = torch.bucketize(ratio, midpoints, right=True)
    codes = torch.where((w < 0) & (exponents > 0), exponents + MINUS, exponents)
    if residual is not None:
        torch.sub(w, _meant(codes, scale), out=residual.after)
    return scales, pack(codes, sizes, 2, 16)


def float4_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    """Overwrite `out`: (n,) with the sum of the decoded payloads, in the order given, divided by `divisor`.

    Raises MalformedError before anything is written.
    """
    for scales, _ in payloads:
        expect_numbers(scales, (blocks(sizes, block),), len(payloads))
    found = [unpack(packed, sizes, 2, 16) for _, packed in payloads]
    for codes in found:
        refuse(codes == MINUS)
    average(
        (
            _meant(codes, spread(scales, sizes, block).to(out.dtype))
            for codes, (scales, _) in zip(found, payloads, strict=True)
        ),
        out,
        divisor,
    )


def _meant(codes: Tensor, scale: Tensor) -> Tensor:
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=scale.dtype, device=scale.device)
    return values[codes.long()] * scale
