"""Half precision: numbers of two bytes, and sums of them in four."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.base.kernels.reference.finite import all_finite, within_range
from gossamer.base.kernels.reference.segments import expect
from gossamer.errors import NotFinite


def half_encode(x: Tensor, dtype: torch.dtype, terms: int = 1) -> Tensor:
    """x rounded to the nearest number of `dtype`, the even one of two: (n,). Beyond the largest it is infinity.

    Raises NotFinite where x holds NaN, or a number so large that a sum of `terms` such could leave x's own range.
    """
    if not within_range(x, terms):
        raise NotFinite("a number is not finite, or too large for the sum over the group")
    return x.to(dtype)


def half_decode(payloads: Sequence[Tensor], out: Tensor, divisor: int = 1) -> bool:
    """Overwrite `out`: (n,) with the sum of the payloads, in the order given, over `divisor`. Whether it is finite.

    Sums are taken in out's dtype, at least float32. One payload, not divided, keeps its bits, so -0 stays -0. Raises
    MalformedError before anything is written.
    """
    first, *others = payloads
    for payload in payloads:
        expect(payload, first.dtype, out.numel())
    out.copy_(first)
    for other in others:
        out.add_(other)
    if divisor != 1:
        out.div_(divisor)
    return all_finite(out)
