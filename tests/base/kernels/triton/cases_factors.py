"""Thin factors: calls that start every one of their kernels."""

from __future__ import annotations

import torch

from gossamer.base.kernels.reference.low_rank import Factoring
from gossamer.base.kernels.reference.residual import Residual
from gossamer.base.kernels.triton import factors


def factoring(rows: int, rank: int) -> Factoring:
    return Factoring.of(rank, [((rows, 8), (8, 1), 0), ((5,), (1,), 8 * rows)], [True, False])


def project(residual: bool) -> None:
    x = torch.zeros(125)
    factors.project(x, factoring(15, 2), torch.ones(16), 4, Residual(x, x) if residual else None)


CASES = [
    lambda: project(False),
    lambda: project(True),
    lambda: factors.expand(factoring(15, 2), torch.ones(35), torch.ones(16), torch.ones(125)),
    lambda: factors.expand(factoring(15, 1), torch.ones(20), torch.ones(8), torch.ones(125)),
    lambda: factors.back_project(torch.ones(125), factoring(15, 2), torch.ones(35), torch.ones(125)),
    *[
        lambda rows=rows, rank=rank: factors.orthonormalize(factoring(rows, rank), torch.zeros(rows * rank + 5))
        for rows, rank in ((1, 1), (15, 2), (1000, 4), (2**13, 8))
    ],
    lambda: factors.orthonormalize(
        Factoring.of(2, [((15, 8), (8, 1), 0), ((999, 8), (8, 1), 120)], [True, True]), torch.zeros(2 * (15 + 999))
    ),
]
