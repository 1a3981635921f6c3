"""Radix selection: the magnitude of the k-th largest entry of each tensor, digit by digit from the highest.

A pass counts how often each value of a digit occurs among the entries with the higher digits of the k-th largest one,
known from the passes before. Counts are integers, so the order in which programs add them does not matter; the number
of passes is fixed, and nothing is read on the host. A pass reads the candidates, and all entries of tensors with
incomplete candidates. If fewer than k count, the k-th is a zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.triton.candidates import Candidates, complete, fitting, seen
from gossamer.base.kernels.triton.launch import EXACT
from gossamer.base.kernels.triton.spans import WARPS
from gossamer.base.kernels.triton.wanted import magnitude

BITS = 11  # of a digit
DIGITS = 3  # hold the 31 bits of a magnitude


@triton.jit
def _narrowed(numbers, prefix, need, bits: tl.constexpr):
    """The k-th largest is in the highest digit that, with those above it, has k entries; k less those above is left."""
    digit = tl.arange(0, 1 << bits)
    often = tl.load(numbers + digit)
    above = tl.sum(often, 0) - tl.cumsum(often, 0)
    chosen = tl.max(tl.where(above + often >= need, digit, 0), 0)
    return (prefix << bits) | chosen, need - tl.sum(tl.where(digit == chosen, above, 0), 0)


@triton.jit
def _count_digits(
    x, before, values, found, counts, rooms, first_rooms, bounds, starts, lengths, owners, blocks, numbers, tensors,
    digit: tl.constexpr, digits: tl.constexpr, bits: tl.constexpr, block: tl.constexpr,
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
        rest = key >> ((digits - 1 - digit) * bits)
        prefix, need = 0, tl.load(counts + owner)
        for earlier in tl.static_range(digit):
            prefix, need = _narrowed(numbers + ((earlier * tensors + owner) << bits), prefix, need, bits)
        near = (within < length) & ((rest >> bits) == prefix)
        often = tl.histogram(rest & ((1 << bits) - 1), 1 << bits, mask=near)
        own = numbers + ((digit * tensors + owner) << bits)
        tl.atomic_add(own + tl.arange(0, 1 << bits), often, mask=often > 0, sem="relaxed")


@triton.jit
def _settle(numbers, counts, thresholds, needs, tensors, digits: tl.constexpr, bits: tl.constexpr):
    owner = tl.program_id(0)
    prefix, need = 0, tl.load(counts + owner)
    for digit in tl.static_range(digits):
        prefix, need = _narrowed(numbers + ((digit * tensors + owner) << bits), prefix, need, bits)
    tl.store(thresholds + owner, prefix & 0x7FFFFFFF)
    tl.store(needs + owner, need)


def thresholds(candidates: Candidates) -> tuple[Tensor, Tensor]:
    """(tensors,) int32 twice: each k-th largest magnitude, and how many equal to it are among the k.

    Where k is zero, the magnitude is above all others.
    """
    spans, rows = candidates.spans, candidates.spans.rows
    numbers = torch.zeros(DIGITS, len(spans), 1 << BITS, dtype=torch.int32, device=candidates.x.device)
    for digit in range(DIGITS):
        _count_digits[(len(rows),)](
            *candidates.arguments, spans.first_rooms, candidates.bounds, rows.starts, rows.lengths, rows.owners,
            len(spans.blocks), numbers, len(spans),
            digit=digit, digits=DIGITS, bits=BITS, block=rows.block, num_warps=WARPS, **EXACT,
        )  # fmt: skip
    found, needs = torch.empty_like(spans.counts), torch.empty_like(spans.counts)
    _settle[(len(spans),)](numbers, spans.counts, found, needs, len(spans), digits=DIGITS, bits=BITS, **EXACT)
    return found, needs
