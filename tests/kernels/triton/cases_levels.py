"""Levels below a norm: calls that start every one of their kernels."""

from __future__ import annotations

from compile_layouts import decodings, encodings

from gossamer.kernels.triton import levels

IN_BYTES, OVER_BYTES = (1, 7, 127), (3, 2**12 - 1, 2**15 - 1)  # codes of 2, 4 and 8 bits; of 3, 13 and 16

CASES = [
    call
    for count in IN_BYTES + OVER_BYTES
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
]
