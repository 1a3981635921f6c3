"""Levels below a norm: calls that start every one of their kernels."""

from __future__ import annotations

from compile_layouts import EVEN, X, decodings, encodings

from gossamer.base.kernels.triton import levels

OTHERS = (1, 3, 127, 2**15 - 1)  # of 2, 3, 8 and 16 bits

CASES = [
    *(lambda count=count: levels.levels_encode(X, EVEN, 1024, count, 1) for count in OTHERS),
    *(
        call
        for count in (7, 2**12 - 1)  # codes within bytes, of 4 bits, and over them, of 13
        for call in (
            *encodings(
                lambda x, sizes, block, residual, count=count: levels.levels_encode(x, sizes, block, count, 1, residual)
            ),
            *decodings(
                lambda heard, sizes, block, out, divisor, count=count: levels.levels_decode(
                    heard, sizes, block, count, out, divisor
                ),
                levels.levelled.level_bits(count),
            ),
        )
    ),
]
