"""Triton kernels: the same functions as plain torch's, for tensors of a GPU, in a few passes over its memory.

A kernel is here under the name, and with the arguments, of the plain torch function that it equals, bit for bit unless
its docstring says otherwise; what it does not serve it hands to that one. TRITON_INTERPRET=1 runs them on processors,
slowly, for tests.

finite       whether numbers can be added up
status       what a kernel found wrong, read once
launch       which tensors are served, and how kernels are started
block_table  where blocks of tensors that lie side by side begin and end
arithmetic   sums by halves and counter-based noise, within a kernel

int8, onebit, twobit, ternary, levels   codes of 8, 1, 2, less than 2, and a few bits
float4, sign_magnitude, half            a sign and a power of two; a sign and one of two magnitudes; 16-bit numbers
measures                                largest magnitudes and sums of squares
tiling, rows                            how programs share blocks; a program's blocks within a kernel
packing, noise                          codes to bytes and back; quantization that is right on average
decoding, stacking                      checks and sums of payloads; payloads as rows of one buffer
"""

from gossamer.kernels.triton.finite import summable, within_range
from gossamer.kernels.triton.float4 import float4_decode, float4_encode
from gossamer.kernels.triton.half import half_decode, half_encode
from gossamer.kernels.triton.int8 import int8_decode, int8_encode
from gossamer.kernels.triton.levels import levels_decode, levels_encode
from gossamer.kernels.triton.measures import magnitudes, squares
from gossamer.kernels.triton.onebit import onebit_decode, onebit_encode
from gossamer.kernels.triton.sign_magnitude import sign_magnitude_decode, sign_magnitude_encode
from gossamer.kernels.triton.ternary import ternary_decode, ternary_encode
from gossamer.kernels.triton.twobit import twobit_decode, twobit_encode, twobit_measured_encode

__all__ = [
    "float4_decode",
    "float4_encode",
    "half_decode",
    "half_encode",
    "int8_decode",
    "int8_encode",
    "levels_decode",
    "levels_encode",
    "magnitudes",
    "onebit_decode",
    "onebit_encode",
    "sign_magnitude_decode",
    "sign_magnitude_encode",
    "squares",
    "summable",
    "ternary_decode",
    "ternary_encode",
    "twobit_decode",
    "twobit_encode",
    "twobit_measured_encode",
    "within_range",
]
