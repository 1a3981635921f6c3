"""Signs and powers of two: calls that start every one of their kernels."""

from __future__ import annotations

from compile_layouts import decodings, encodings

from gossamer.base.kernels.triton import float4

CASES = [*encodings(float4.float4_encode), *decodings(float4.float4_decode, 4)]
