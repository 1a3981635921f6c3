"""The inner loops, as pure functions over raw buffers.

Each takes `sizes`, the numbers of elements of the tensors that lie side by side in a buffer; scales, blocks and counts
never reach from one tensor into the next. Plain torch is the truth; faster loops equal it bit for bit.
"""

from gossamer.kernels.checks import all_finite, within_range
from gossamer.kernels.gram_schmidt import orthonormal
from gossamer.kernels.places import coded_bytes, decode_places, encode_places, sparse_decode
from gossamer.kernels.quantise import int8_decode, int8_encode
from gossamer.kernels.residual import Residual
from gossamer.kernels.select import above, largest

__all__ = [
    "Residual",
    "above",
    "all_finite",
    "coded_bytes",
    "decode_places",
    "encode_places",
    "int8_decode",
    "int8_encode",
    "largest",
    "orthonormal",
    "sparse_decode",
    "within_range",
]
