"""Selection: calls that start every one of its kernels."""

from __future__ import annotations

from itertools import product

import torch

from gossamer.base.kernels.reference.residual import Residual
from gossamer.base.kernels.triton import select

N = 20_000


def owed() -> Residual:
    return Residual(torch.zeros(N), torch.empty(N))


CASES = [
    *[
        lambda dtype=dtype, sizes=sizes, residual=residual: select.largest(
            torch.zeros(N, dtype=dtype), sizes, [5] * len(sizes), residual
        )
        for dtype, (sizes, residual) in product(
            [torch.float32, torch.bfloat16, torch.float16], [([7, N - 7], None), ([N], owed())]
        )
    ],
    *[
        lambda nesterov=nesterov: select.largest_with_momentum(
            torch.zeros(N), [N], [5], 0.9, owed(), owed(), nesterov=nesterov
        )
        for nesterov in (False, True)
    ],
    lambda: select.above(torch.zeros(N), 0.5, 9),
    lambda: select.above(torch.zeros(N, dtype=torch.bfloat16), 0.5, 9, owed()),
]
