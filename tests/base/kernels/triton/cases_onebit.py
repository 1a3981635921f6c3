"""Sign codes: calls that start every one of their kernels."""

from __future__ import annotations

from compile_layouts import decodings, encodings

from gossamer.base.kernels.triton import onebit

CASES = [*encodings(onebit.onebit_encode), *decodings(onebit.onebit_decode, 1)]
