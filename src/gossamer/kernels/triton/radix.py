"""Radix selection: the magnitude of the k-th largest entry of each tensor, digit by digit from the highest.

A pass counts how often each value of a digit occurs among the entries whose higher digits are those of the k-th largest
one, which tells its next digit. Counts are whole numbers, so that the order in which programs add them does not matter;
how many passes there are depends on types only, and nothing is read on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.triton.launch import EXACT
from gossamer.kernels.triton.spans import WARPS, Spans
from gossamer.kernels.triton.status import NOT_FINITE, report
from gossamer.kernels.triton.wanted import INFINITE, magnitude, wanted

DIGITS = ((20, 11), (10, 10), (0, 10))  # (lowest bit, bits) of the 31 of a magnitude
NARROW = DIGITS[:2]  # 16-bit numbers end before the last digit
DEEPEST = 1 << max(bits for _, bits in DIGITS)


@triton.jit
def _count_digits(
    x, before, starts, lengths, owners, prefixes, digits, status,
    owes: tl.constexpr, shift: tl.constexpr, bits: tl.constexpr, bit: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    within, owner = tl.arange(0, block), tl.load(owners + number)
    inside = within < tl.load(lengths + number)
    key = magnitude(wanted(x, before if owes else None, tl.load(starts + number) + within, inside))
    if shift + bits == 31:
        report(status, key >= INFINITE, bit)
    near = inside & ((key >> (shift + bits)) == tl.load(prefixes + owner))
    found = tl.histogram((key >> shift) & ((1 << bits) - 1), 1 << bits, mask=near)
    digit = tl.arange(0, 1 << bits)
    tl.atomic_add(digits + (owner << bits) + digit, found, mask=found > 0, sem="relaxed")


@triton.jit
def _narrow(digits, prefixes, needs, bits: tl.constexpr):
    """The k-th largest is in the highest digit that, with those above it, has k entries; k less those above is left."""
    owner = tl.program_id(0)
    digit = tl.arange(0, 1 << bits)
    found = tl.load(digits + (owner << bits) + digit)
    need = tl.load(needs + owner)
    above = tl.sum(found, 0) - tl.cumsum(found, 0)
    chosen = tl.max(tl.where(above + found >= need, digit, 0), 0)
    tl.store(prefixes + owner, (tl.load(prefixes + owner) << bits) | chosen)
    tl.store(needs + owner, need - tl.sum(tl.where(digit == chosen, above, 0), 0))


def thresholds(x: Tensor, before: Tensor | None, spans: Spans, status: Tensor) -> tuple[Tensor, Tensor, int]:
    """(tensors,) int32 twice: each k-th largest magnitude, and how many equal to it are among the k; and how many low
    bits of the magnitudes, which are zero everywhere, are left out. Reports what is not finite.

    Where k is zero, the magnitude is above all others.
    """
    prefixes, needs = torch.zeros_like(spans.counts), spans.counts.clone()
    table = spans.table
    chosen = NARROW if before is None and x.dtype.itemsize == 2 else DIGITS
    digits = torch.zeros(len(chosen), len(spans) * DEEPEST, dtype=torch.int32, device=x.device)
    for row, (shift, bits) in zip(digits, chosen, strict=True):
        _count_digits[(len(table),)](
            x, x if before is None else before, table.starts, table.lengths, table.owners, prefixes, row, status,
            owes=before is not None, shift=shift, bits=bits, bit=NOT_FINITE, block=table.block, num_warps=WARPS,
            **EXACT,
        )  # fmt: skip
        _narrow[(len(spans),)](row, prefixes, needs, bits=bits, **EXACT)
    return prefixes, needs, chosen[-1][0]
