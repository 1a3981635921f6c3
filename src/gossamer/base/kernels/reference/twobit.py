"""Two-bit code: plus a threshold, minus it, or nothing. w = x + residual.before, or x.

Arithmetic as in quantize.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.base.kernels.reference.bits import pack, refuse, unpack
from gossamer.base.kernels.reference.residual import Residual, wanted
from gossamer.base.kernels.reference.segments import (
    average,
    block_sums,
    blocks,
    expect,
    expect_numbers,
    sendable,
    spread,
)

MINUS, PLUS = 2, 3


def twobit_encode(
    x: Tensor, sizes: Sequence[int], block: int, thresholds: Tensor, residual: Residual | None = None
) -> Tensor:
    """Codes, four to a byte: 3 where w >= t, 2 where w <= -t, else 0, with t the block's of thresholds: (blocks,)
    float32.

    They stand for t, -t and zero. Raises NotFinite.
    """
    expect(thresholds, torch.float32, blocks(sizes, block))
    return _encode(wanted(x, residual), sizes, block, thresholds, residual)


def twobit_measured_encode(
    x: Tensor, sizes: Sequence[int], block: int, part: float, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """(thresholds, codes): the same with t = part sum of w^2 / sum of |w| over a block (a power of two), 0 where both
    are.

    Both sums are taken by halves in float64, because squares leave float32's range long before the numbers do.
    """
    w = wanted(x, residual)
    first = block_sums(w.double().abs(), sizes, block)
    second = block_sums(w.double().square(), sizes, block)
    thresholds = sendable(torch.where(first == 0, first, part * second / first))
    return thresholds, _encode(w, sizes, block, thresholds, residual)


def twobit_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], block: int, out: Tensor, divisor: int = 1
) -> None:
    """Overwrite `out`: (n,) with the sum of the decoded (thresholds, codes), in the order given, divided by `divisor`.

    Raises MalformedError before anything is written.
    """
    found = [unpack(packed, sizes, 4, 4) for _, packed in payloads]
    for codes, (thresholds, _) in zip(found, payloads, strict=True):
        expect_numbers(thresholds, (blocks(sizes, block),), len(payloads))
        refuse(codes == 1)
    average(
        (
            _meant(codes, spread(thresholds, sizes, block).to(out.dtype))
            for codes, (thresholds, _) in zip(found, payloads, strict=True)
        ),
        out,
        divisor,
    )


def _encode(w: Tensor, sizes: Sequence[int], block: int, thresholds: Tensor, residual: Residual | None) -> Tensor:
    limits = spread(thresholds, sizes, block).to(w.dtype)
    codes = torch.where(w >= limits, PLUS, torch.where(w <= -limits, MINUS, 0))
    if residual is not None:
        torch.sub(w, _meant(codes, limits), out=residual.after)
    return pack(codes, sizes, 4, 4)


def _meant(codes: Tensor, limits: Tensor) -> Tensor:
    return torch.where(codes == PLUS, limits, torch.where(codes == MINUS, -limits, torch.zeros_like(limits)))
