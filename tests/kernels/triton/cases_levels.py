"""Levels below a norm: calls that start every one of their kernels."""

from __future__ import annotations

from compile_layouts import EVEN, X, decodings, encodings

from gossamer.kernels.triton import levels

CASES = [
    *encodings(lambda x, sizes, block, residual: levels.levels_encode(x, sizes, block, 7, 1, residual)),
    *(lambda count=count: levels.levels_encode(X, EVEN, 1024, count, 1) for count in (1, 127, 2**15 - 1)),
    *decodings(lambda heard, sizes, block, out, divisor: levels.levels_decode(heard, sizes, block, 7, out, divisor), 4),
]
