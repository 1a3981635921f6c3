"""Triton kernels: the same functions as plain torch's, for tensors of a GPU, in a few passes over its memory.

A kernel is here under the name, and with the arguments, of the plain torch function that it equals, bit for bit unless
its docstring says otherwise; what it does not serve it hands to that one. TRITON_INTERPRET=1 runs them on processors,
slowly, for tests.

finite       whether numbers can be added up
select       the entries that travel: radix finds thresholds, compaction takes what is above them, in order
places       places in few bits
sparse       sums of entries at places
walsh        sums and differences that spread entries over their block
factors      matrices as two thin factors
orthonormal  orthonormal columns, by the order of sums of plain torch
factor_table where matrices and their factors lie
momentum     what momentum offers for selection
wanted       w and its magnitudes, within a kernel
spans        where tensors lie among entries, blocks and what is taken of them
status       what a kernel found wrong, read once
launch       which tensors are served, and how kernels are started
block_table  where blocks of tensors that lie side by side begin and end
arithmetic   sums by halves and counter-based noise, within a kernel
"""

from gossamer.kernels.triton.factors import back_project, expand, project
from gossamer.kernels.triton.finite import summable, within_range
from gossamer.kernels.triton.orthonormal import orthonormalize
from gossamer.kernels.triton.places import decode_places, encode_places
from gossamer.kernels.triton.select import above, largest, largest_with_momentum
from gossamer.kernels.triton.sparse import scatter, sparse_decode
from gossamer.kernels.triton.walsh import hadamard

__all__ = [
    "above",
    "back_project",
    "decode_places",
    "encode_places",
    "expand",
    "hadamard",
    "largest",
    "largest_with_momentum",
    "orthonormalize",
    "project",
    "scatter",
    "sparse_decode",
    "summable",
    "within_range",
]
