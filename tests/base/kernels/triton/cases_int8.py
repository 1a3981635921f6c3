"""8-bit codes: calls that start every one of their kernels."""

from __future__ import annotations

import torch
from compile_layouts import decodings, encodings

from gossamer.base.kernels.triton import int8

CASES = [
    *encodings(lambda x, sizes, block, residual: int8.int8_encode(x, sizes, block, None, residual)),
    *encodings(lambda x, sizes, block, residual: int8.int8_encode(x, sizes, block, 2**32 + 1, residual)),
    *decodings(int8.int8_decode, 8, dtype=torch.int8),
]
