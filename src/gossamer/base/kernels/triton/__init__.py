"""Triton kernels: the same functions as plain torch's, for tensors of a GPU, in a few passes over its memory.

A kernel is here under the name, and with the arguments, of the plain torch function that it equals, bit for bit unless
its docstring has exceptions; unsupported inputs use that one. TRITON_INTERPRET=1 runs them on processors,
slowly, for tests.

Public kernels, by subject:

int8, onebit, twobit, ternary, levels   codes of 8, 1, 2, less than 2, and a few bits
float4, sign_magnitude, half            a sign and a power of two; a sign and one of two magnitudes; 16-bit numbers
measures, finite                        largest magnitudes and sums of squares; whether numbers can be added up
select, places, sparse                  the entries that travel; their places in few bits; sums of entries at places
walsh, factors                          a rotation made of sums and differences; matrices as two thin factors

Support code, for the host and within kernels:

launch, status                          starting kernels; their errors, read once
block_table, tiling, spans              where blocks and tensors lie, copied to a device once
code_format, encoding, decoding         formats of codes; blocks to payloads; checks and sums of payloads
stacking                                payloads as rows of one buffer
candidates, wanted                      entries above a bound, gathered in one pass; w and magnitudes
rows, packing, noise                    a program's blocks; codes to bytes; rounding right on average
"""

from gossamer.base.kernels.triton.factors import back_project, expand, orthonormalize, project
from gossamer.base.kernels.triton.finite import summable, within_range
from gossamer.base.kernels.triton.float4 import float4_decode, float4_encode
from gossamer.base.kernels.triton.half import half_decode, half_encode
from gossamer.base.kernels.triton.int8 import int8_decode, int8_encode
from gossamer.base.kernels.triton.levels import levels_decode, levels_encode
from gossamer.base.kernels.triton.measures import magnitudes, squares
from gossamer.base.kernels.triton.onebit import onebit_decode, onebit_encode
from gossamer.base.kernels.triton.places import decode_places, encode_places
from gossamer.base.kernels.triton.select import above, largest, largest_with_momentum
from gossamer.base.kernels.triton.sign_magnitude import sign_magnitude_decode, sign_magnitude_encode
from gossamer.base.kernels.triton.sparse import scatter, sparse_decode
from gossamer.base.kernels.triton.ternary import ternary_decode, ternary_encode
from gossamer.base.kernels.triton.twobit import twobit_decode, twobit_encode, twobit_measured_encode
from gossamer.base.kernels.triton.walsh import hadamard

__all__ = [
    "above",
    "back_project",
    "decode_places",
    "encode_places",
    "expand",
    "float4_decode",
    "float4_encode",
    "hadamard",
    "half_decode",
    "half_encode",
    "int8_decode",
    "int8_encode",
    "largest",
    "largest_with_momentum",
    "levels_decode",
    "levels_encode",
    "magnitudes",
    "onebit_decode",
    "onebit_encode",
    "orthonormalize",
    "project",
    "scatter",
    "sign_magnitude_decode",
    "sign_magnitude_encode",
    "sparse_decode",
    "squares",
    "summable",
    "ternary_decode",
    "ternary_encode",
    "twobit_decode",
    "twobit_encode",
    "twobit_measured_encode",
    "within_range",
]
