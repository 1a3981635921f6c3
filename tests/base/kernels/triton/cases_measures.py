"""Largest magnitudes and sums of squares: calls that start every one of their kernels."""

from __future__ import annotations

from compile_layouts import EVEN, ODD, X

from gossamer.base.kernels.triton import measures

NUMBERS = X, X.half(), X.bfloat16()

CASES = [
    *(lambda x=x: measures.magnitudes(x, ODD) for x in NUMBERS),
    *(lambda x=x: measures.squares(x, EVEN, 1024) for x in NUMBERS),
    *(lambda block=block: measures.squares(X, ODD, block) for block in (8, 2**14)),
]
