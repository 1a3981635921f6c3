"""Kernels: the inner loops of compressors, as pure functions over raw buffers.

Each takes `sizes`, the numbers of elements of the tensors that are concatenated in a buffer; scales, blocks and counts
never extend from one tensor into the next. Plain torch is the reference. Compiled loops equal it bit for bit, and
unsupported inputs use plain torch.

reference/   the reference in plain torch, a file for each format
triton/      the same on a GPU
library      the compiled loops, and the implementation of a call: compiled, Triton's or plain torch
quantize     codes of 16 bits to less than 2, and sums of decoded ones, compiled
hadamard     a rotation made of sums and differences, compiled
low_rank     matrices as two thin factors, compiled; its products of one worker's own numbers are rounded differently
select       selection of entries and coding of their places, compiled
checks       checksums; whether numbers can be added up
polyval      a keyed hash of messages, compiled
threads      how many threads share a call's work, also in threads that the library makes
blocks       checks of buffers before a compiled loop runs; narrow residuals, widened for it
buffer_pool  large buffers that are reused between steps
"""

from gossamer.base.kernels.blocks import widened
from gossamer.base.kernels.buffer_pool import scratch_for, scratch_like
from gossamer.base.kernels.checks import summable, within_range
from gossamer.base.kernels.hadamard import hadamard
from gossamer.base.kernels.low_rank import back_project, expand, orthonormalize, project
from gossamer.base.kernels.quantize import (
    float4_decode,
    float4_encode,
    half_decode,
    half_encode,
    int8_decode,
    int8_encode,
    levels_decode,
    levels_encode,
    magnitudes,
    onebit_decode,
    onebit_encode,
    sign_magnitude_decode,
    sign_magnitude_encode,
    squares,
    ternary_decode,
    ternary_encode,
    twobit_decode,
    twobit_encode,
    twobit_measured_encode,
)
from gossamer.base.kernels.reference.bits import packed_bytes
from gossamer.base.kernels.reference.dct import dct
from gossamer.base.kernels.reference.finite import HEADROOM, all_finite, expect_summable
from gossamer.base.kernels.reference.index_coding import coded_bytes
from gossamer.base.kernels.reference.levels import level_bytes
from gossamer.base.kernels.reference.low_rank import Factoring
from gossamer.base.kernels.reference.residual import Residual
from gossamer.base.kernels.select import (
    above,
    decode_places,
    encode_places,
    largest,
    largest_with_momentum,
    scatter,
    sparse_decode,
)
from gossamer.base.kernels.threads import share_among, thread_limit

__all__ = [
    "HEADROOM",
    "Factoring",
    "Residual",
    "above",
    "all_finite",
    "back_project",
    "coded_bytes",
    "dct",
    "decode_places",
    "encode_places",
    "expand",
    "expect_summable",
    "float4_decode",
    "float4_encode",
    "hadamard",
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
    "orthonormalize",
    "packed_bytes",
    "project",
    "scatter",
    "scratch_for",
    "scratch_like",
    "share_among",
    "sign_magnitude_decode",
    "sign_magnitude_encode",
    "sparse_decode",
    "squares",
    "summable",
    "ternary_decode",
    "ternary_encode",
    "thread_limit",
    "twobit_decode",
    "twobit_encode",
    "twobit_measured_encode",
    "widened",
    "within_range",
]
