"""Signs and one of two magnitudes: calls that start every one of their kernels."""

from __future__ import annotations

from compile_layouts import decodings, encodings

from gossamer.base.kernels.triton import sign_magnitude

CASES = [
    *encodings(sign_magnitude.sign_magnitude_encode),
    *decodings(sign_magnitude.sign_magnitude_decode, 2, width=2),
]
