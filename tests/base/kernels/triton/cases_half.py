"""Half precision: calls that start every one of its kernels."""

from __future__ import annotations

import torch
from compile_layouts import OUT, X

from gossamer.base.kernels.triton import half

HALVES = torch.bfloat16, torch.float16

CASES = [
    *(lambda x=x, dtype=dtype: half.half_encode(x, dtype, 4) for x in (X, X.half(), X.bfloat16()) for dtype in HALVES),
    *(lambda dtype=dtype: half.half_decode([X.to(dtype)] * 3, OUT, 3) for dtype in HALVES),
]
