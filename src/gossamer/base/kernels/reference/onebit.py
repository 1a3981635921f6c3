"""Sign code: the sign of every entry, and one magnitude per block. w = x + residual.before, or x.

Arithmetic as in quantize.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.base.kernels.reference.bits import pack, unpack
from gossamer.base.kernels.reference.residual import Residual, wanted
from gossamer.base.kernels.reference.segments import (
    average,
    block_sizes,
    block_sums,
    blocks,
    expect_numbers,
    sendable,
    spread,
)


def onebit_encode(
    x: Tensor, sizes: Sequence[int], block: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """(scales, bits): (blocks,) float32 and uint8, eight entries to a byte.

    s = mean |w| over a block (a power of two, summed by halves); a bit is set where w < 0. Decodes to -s where it is
    set and s elsewhere. Raises NotFinite, also where a block's sum is not finite.
    """
    w = wanted(x, residual)
    sums = block_sums(w.abs(), sizes, block)
    scales = sendable(sums / block_sizes(sizes, block, sums))
    negative = w < 0
    if residual is not None:
        torch.sub(w, _signed(negative, spread(scales, sizes, block).to(w.dtype)), out=residual.after)
    return scales, pack(negative, sizes, 8, 2)


def onebit_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    """Overwrite `out`: (n,) with the sum of the decoded payloads, in the order given, divided by `divisor`.

    Raises MalformedError before anything is written.
    """
    for scales, _ in payloads:
        expect_numbers(scales, (blocks(sizes, block),), len(payloads))
    negatives = [unpack(bits, sizes, 8, 2) != 0 for _, bits in payloads]
    average(
        (
            _signed(negative, spread(scales, sizes, block).to(out.dtype))
            for negative, (scales, _) in zip(negatives, payloads, strict=True)
        ),
        out,
        divisor,
    )


def _signed(negative: Tensor, magnitude: Tensor) -> Tensor:
    return torch.where(negative, -magnitude, magnitude)
