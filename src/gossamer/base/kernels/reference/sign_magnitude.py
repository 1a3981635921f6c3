"""Sign and magnitude: the sign of every entry, and one of its block's two magnitudes. w = x + residual.before, or x.

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

LARGE, MINUS = 1, 2


def sign_magnitude_encode(
    x: Tensor, sizes: Sequence[int], block: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """(means, codes): (2 blocks,) float32, a block's small and its large magnitude, and uint8, four entries to a byte.

    An entry is large where |w| exceeds the mean |w| of its block (a power of two, summed by halves). The magnitudes are
    the means of |w| over the entries that are not large and over those that are (by halves too), 0 where there are
    none. A code is 1 where w is large, and 2 more where w < 0. Raises NotFinite, also where a sum is not finite.
    """
    w = wanted(x, residual)
    magnitude, nothing = w.abs(), torch.zeros_like(w)
    sums = block_sums(magnitude, sizes, block)
    entries = block_sizes(sizes, block, sums)
    large = magnitude > spread(sums / entries, sizes, block)
    counts = block_sums(large.to(w.dtype), sizes, block)
    means = [
        block_sums(torch.where(large, *pair), sizes, block) / number.clamp(min=1)
        for pair, number in (((nothing, magnitude), entries - counts), ((magnitude, nothing), counts))
    ]
    sendable_means = sendable(torch.stack(means, 1).view(-1))
    codes = large.to(torch.uint8) * LARGE + (w < 0).to(torch.uint8) * MINUS
    if residual is not None:
        torch.sub(w, _meant(codes, sendable_means, sizes, block, w.dtype), out=residual.after)
    return sendable_means, pack(codes, sizes, 4, 4)


def sign_magnitude_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    """Overwrite `out`: (n,) with the sum of the decoded payloads, in the order given, divided by `divisor`.

    Raises MalformedError before anything is written.
    """
    for means, _ in payloads:
        expect_numbers(means, (2 * blocks(sizes, block),), len(payloads))
    found = [unpack(packed, sizes, 4, 4) for _, packed in payloads]
    average(
        (_meant(codes, means, sizes, block, out.dtype) for codes, (means, _) in zip(found, payloads, strict=True)),
        out,
        divisor,
    )


def _meant(codes: Tensor, means: Tensor, sizes: Sequence[int], block: int, dtype: torch.dtype) -> Tensor:
    small, large = (spread(each, sizes, block).to(dtype) for each in means.view(-1, 2).unbind(1))
    magnitude = torch.where(codes % 2 == LARGE, large, small)
    return torch.where(codes >= MINUS, -magnitude, magnitude)
