"""Plus a threshold, minus it, or nothing. w = x + residual.before, or x.

Arithmetic as in quantise.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.kernels.bits import pack, refuse, unpack
from gossamer.kernels.residual import Residual, wanted
from gossamer.kernels.spans import average, expect, per_tensor

MINUS, PLUS = 2, 3


def twobit_encode(
    x: Tensor, sizes: Sequence[int], thresholds: Sequence[float] | Tensor, residual: Residual | None = None
) -> Tensor:
    """Codes, four to a byte: 3 where w >= t, 2 where w <= -t, else 0, with t the float32 threshold of the tensor.

    They stand for t, -t and zero. Raises NotFinite.
    """
    w = wanted(x, residual)
    limits = per_tensor(torch.as_tensor(thresholds, dtype=torch.float32, device=w.device), sizes).to(w.dtype)
    codes = torch.where(w >= limits, PLUS, torch.where(w <= -limits, MINUS, 0))
    if residual is not None:
        torch.sub(w, _meant(codes, limits), out=residual.after)
    return pack(codes, sizes, 4, 4)


def twobit_decode(
    payloads: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], out: Tensor, divisor: int = 1
) -> None:
    """Overwrite `out`: (n,) with the sum of what (thresholds, codes) stand for, in the order given, over `divisor`.

    Raises MalformedError before anything is written.
    """
    found = [unpack(packed, sizes, 4, 4) for _, packed in payloads]
    for codes, (thresholds, _) in zip(found, payloads, strict=True):
        expect(thresholds, torch.float32, len(sizes))
        refuse(codes == 1)
    average(
        (
            _meant(codes, per_tensor(thresholds, sizes).to(out.dtype))
            for codes, (thresholds, _) in zip(found, payloads, strict=True)
        ),
        out,
        divisor,
    )


def _meant(codes: Tensor, limits: Tensor) -> Tensor:
    return torch.where(codes == PLUS, limits, torch.where(codes == MINUS, -limits, torch.zeros_like(limits)))
