"""Two-bit codes: calls that start every one of their kernels."""

from __future__ import annotations

import torch
from compile_layouts import decodings, encodings

from gossamer.base.kernels.triton import twobit


def given(x, sizes, block, residual):
    thresholds = torch.zeros(sum(-(-size // block) for size in sizes))
    twobit.twobit_encode(x, sizes, block, thresholds, residual)


CASES = [
    next(encodings(given)),
    *encodings(lambda x, sizes, block, residual: twobit.twobit_measured_encode(x, sizes, block, 0.5, residual)),
    *decodings(twobit.twobit_decode, 2),
]
