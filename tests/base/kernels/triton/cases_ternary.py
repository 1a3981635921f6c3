"""Ternary codes: calls that start every one of their kernels."""

from __future__ import annotations

import torch
from compile_layouts import EVEN, OUT, OWED, N, X

from gossamer.base.kernels.triton import ternary

SCALES = torch.ones(1)

CASES = [
    call
    for per_byte in (4, 5)
    for call in (
        *(
            lambda x=x, per_byte=per_byte, after=after: ternary.ternary_encode(x, EVEN, SCALES, 1, per_byte, after)
            for x, after in ((X, OWED), (X.half(), None), (X.bfloat16(), OWED))
        ),
        lambda per_byte=per_byte: ternary.ternary_decode(
            [(torch.zeros(N // per_byte, dtype=torch.uint8),)] * 3, SCALES, EVEN, per_byte, OUT, 3
        ),
    )
]
