"""Radix selection: the magnitude of the k-th largest entry of each tensor, digit by digit from the highest.

A pass counts how often each value of a digit occurs among the entries whose higher digits are those of the k-th largest
one, which tells its next digit. Counts are whole numbers, so that the order in which programs add them does not matter;
how many passes there are is always the same, and nothing is read on the host. A pass goes over the candidates, and over
all entries of tensors whose candidates do not tell. Fewer entries than k count: the k-th is a zero then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.triton.candidates import Candidates, complete, fitting, seen
from gossamer.kernels.triton.launch import EXACT
from gossamer.kernels.triton.spans import WARPS
from gossamer.kernels.triton.wanted import magnitude

DIGITS = ((20, 11), (10, 10), (0, 10))  # (lowest bit, bits) of the 31 of a magnitude
DEEPEST = 1 << max(bits for _, bits in DIGITS)


@triton.jit
def _count_digits(
    x, before, values, found, counts, rooms, first_rooms, bounds, starts, lengths, owners, blocks, prefixes, digits,
    shift: tl.constexpr, bits: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Of a block of all entries, or one of the room for candidates: which of both is looked at, and else left."""
    number = tl.program_id(0)
    owner, start, length, kept = tl.load(owners + number), tl.load(starts + number), 0, number >= blocks
    all_but_zeros = (tl.load(bounds + owner) <= 1) & fitting(found, rooms, owner)
    if kept == (complete(found, counts, rooms, owner) | all_but_zeros):
        length = tl.load(lengths + number)
        if kept:
            length = tl.minimum(length, tl.load(found + owner) + tl.load(first_rooms + owner) - start)
    if length > 0:
        within = tl.arange(0, block)
        key = magnitude(seen(x, before, values, start, within, length, kept))
        near = (within < length) & ((key >> (shift + bits)) == tl.load(prefixes + owner))
        often = tl.histogram((key >> shift) & ((1 << bits) - 1), 1 << bits, mask=near)
        digit = tl.arange(0, 1 << bits)
        tl.atomic_add(digits + (owner << bits) + digit, often, mask=often > 0, sem="relaxed")


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


def thresholds(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """(tensors,) int32 twice: each k-th largest magnitude, and how many equal to it are among the k.

    Where k is zero, the magnitude is above all others.
    """
    spans, rows = candidates.spans, candidates.spans.rows
    prefixes, needs = torch.zeros_like(spans.counts), spans.counts.clone()
    digits = torch.zeros(len(DIGITS), len(spans) * DEEPEST, dtype=torch.int32, device=prefixes.device)
    for row, (shift, bits) in zip(digits, DIGITS, strict=True):
        _count_digits[(len(rows),)](
            *candidates.arguments, spans.first_rooms, candidates.bounds, rows.starts, rows.lengths, rows.owners,
            len(spans.blocks), prefixes, row, shift=shift, bits=bits, block=rows.block, num_warps=WARPS, **EXACT,
        )  # fmt: skip
        _narrow[(len(spans),)](row, prefixes, needs, bits=bits, **EXACT)
    return prefixes, needs
