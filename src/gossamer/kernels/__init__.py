"""The inner loops, as pure functions over raw buffers.

Each takes `sizes`, the numbers of elements of the tensors that lie side by side in a buffer; scales, blocks and counts
never reach from one tensor into the next. Plain torch is the truth; faster loops equal it bit for bit.
"""

from gossamer.kernels.buffer_pool import scratch_for, scratch_like
from gossamer.kernels.finite import within_range
from gossamer.kernels.float4 import float4_decode, float4_encode, sign_magnitude_decode, sign_magnitude_encode
from gossamer.kernels.half import half_decode, half_encode
from gossamer.kernels.quantize import (
    int8_decode,
    int8_encode,
    levels_decode,
    levels_encode,
    magnitudes,
    onebit_decode,
    onebit_encode,
    squares,
    ternary_decode,
    ternary_encode,
    twobit_decode,
    twobit_encode,
    twobit_measured_encode,
)
from gossamer.kernels.reference.bits import packed_bytes
from gossamer.kernels.reference.finite import all_finite
from gossamer.kernels.reference.gram_schmidt import orthonormal
from gossamer.kernels.reference.index_coding import coded_bytes
from gossamer.kernels.reference.levels import level_bytes
from gossamer.kernels.reference.residual import Residual
from gossamer.kernels.select import (
    above,
    decode_places,
    encode_places,
    largest,
    largest_with_momentum,
    scatter,
    sparse_decode,
)

__all__ = [
    "Residual",
    "above",
    "all_finite",
    "coded_bytes",
    "decode_places",
    "encode_places",
    "float4_decode",
    "float4_encode",
    "half_decode",
    "half_encode",
    "int8_decode",
    "int8_encode",
    "largest",
    "largest_with_momentum",
    "level_bytes",
    "levels_decode",
    "levels_encode",
    "magnitudes",
    "onebit_decode",
    "onebit_encode",
    "orthonormal",
    "packed_bytes",
    "scatter",
    "scratch_for",
    "scratch_like",
    "sign_magnitude_decode",
    "sign_magnitude_encode",
    "sparse_decode",
    "squares",
    "ternary_decode",
    "ternary_encode",
    "twobit_decode",
    "twobit_encode",
    "twobit_measured_encode",
    "within_range",
]
