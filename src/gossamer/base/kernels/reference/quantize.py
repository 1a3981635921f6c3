"""8-bit code of every entry. w = x + residual.before, or x; residual.after = w - the decoded code.

Arithmetic is float32 (float64 for such input), one rounding for every operation written, none fused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.base.kernels.reference.counter_rng import stochastic
from gossamer.base.kernels.reference.residual import Residual, wanted
from gossamer.base.kernels.reference.segments import (
    average,
    block_maxima,
    blocks,
    expect,
    expect_numbers,
    sendable,
    spread,
)


def int8_encode(
    x: Tensor, sizes: Sequence[int], block: int, key: int | None = None, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """(scales, codes): (blocks,) float32 and (n,) int8.

    s = max |w| / 127 over a block, q = w / s to the nearest integer (to the even one of two), or under a key as
    noise.stochastic does it, then between -127 and 127; 0 where s is. Decodes to q s. Raises NotFinite.
    """
    w = wanted(x, residual)
    scales = sendable(block_maxima(w.abs(), sizes, block)) / 127
    scale = spread(scales, sizes, block).to(w.dtype)
    codes = (_nearest(w, scale) if key is None else stochastic(w, scale, 127, key)).to(torch.int8)
    if residual is not None:
        torch.sub(w, codes.to(w.dtype) * scale, out=residual.after)
    return scales, codes


def int8_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    """Overwrite `out`: (n,) with the sum of q s over the payloads, in the order given, over `divisor`.

    Raises MalformedError before anything is written.
    """
    for scales, codes in payloads:
        expect_numbers(scales, (blocks(sizes, block),), len(payloads))
        expect(codes, torch.int8, sum(sizes))
    average((codes.to(out.dtype) * spread(s, sizes, block).to(out.dtype) for s, codes in payloads), out, divisor)


def _nearest(w: Tensor, scale: Tensor) -> Tensor:
    whole = (w / torch.where(scale == 0, torch.ones_like(scale), scale)).round().clamp(-127, 127)
    return torch.where(scale == 0, torch.zeros_like(whole), whole)
