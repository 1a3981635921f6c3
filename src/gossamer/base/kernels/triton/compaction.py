"""Compaction: entries above a magnitude, and the first of those equal to it, side by side in their order.

Each block counts its own, a running sum over blocks gives their offsets, and each block writes them there: no program
waits for another. A block's own are its run of candidates, or all its entries where those are not complete.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.triton.candidates import Candidates, complete, seen
from gossamer.base.kernels.triton.launch import EXACT, TILE
from gossamer.base.kernels.triton.wanted import magnitude


@triton.jit
def _own(found, counts, rooms, starts, lengths, run_starts, run_lengths, number, owner):
    """(start, length, kept): a block's run of candidates if `kept`, or the block."""
    kept = complete(found, counts, rooms, owner)
    start = tl.where(kept, tl.load(run_starts + number), tl.load(starts + number))
    return start, tl.where(kept, tl.load(run_lengths + number), tl.load(lengths + number)), kept


@triton.jit
def _count(
    x, before, values, found, counts, rooms, starts, lengths, owners, run_starts, run_lengths, thresholds, numbers,
    blocks, tile: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    owner = tl.load(owners + number)
    start, length, kept = _own(found, counts, rooms, starts, lengths, run_starts, run_lengths, number, owner)
    threshold = tl.load(thresholds + owner)
    larger, equal = tl.zeros((tile,), tl.int32), tl.zeros((tile,), tl.int32)
    for first in range(0, length, tile):
        within = first + tl.arange(0, tile)
        inside = within < length
        key = magnitude(seen(x, before, values, start, within, length, kept))
        larger += (inside & (key > threshold)).to(tl.int32)
        equal += (inside & (key == threshold)).to(tl.int32)
    tl.store(numbers + number, tl.sum(larger, 0))
    tl.store(numbers + blocks + number, tl.sum(equal, 0))


@triton.jit
def _between(sums, first, end):
    """The sum from `first` to before `end`. sums: of all up to each one, and with it."""
    until_end = tl.load(sums + end - 1, mask=end > 0, other=0)
    return until_end - tl.load(sums + first - 1, mask=first > 0, other=0)


@triton.jit
def _take(
    x, before, values, found, counts, rooms, starts, lengths, owners, run_starts, run_lengths, run_places, thresholds,
    needs, sums, blocks, firsts, first_blocks, status, taken_places, taken_values, ends, tile: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    owner = tl.load(owners + number)
    start, length, kept = _own(found, counts, rooms, starts, lengths, run_starts, run_lengths, number, owner)
    length = tl.where(tl.load(status) == 0, length, 0)  # else nothing is written
    threshold, need, first_block = tl.load(thresholds + owner), tl.load(needs + owner), tl.load(first_blocks + owner)
    larger_before = _between(sums, first_block, number)
    equals_before = _between(sums + blocks, first_block, number)
    for first in range(0, length, tile):
        within = first + tl.arange(0, tile)
        inside = within < length
        w = seen(x, before, values, start, within, length, kept)
        run_place = tl.load(run_places + start + within, mask=within < tl.where(kept, length, 0), other=0)
        key, place = magnitude(w), tl.where(kept, run_place, start + within)
        larger, equal = inside & (key > threshold), inside & (key == threshold)
        both = tl.cumsum(larger.to(tl.int32) + (equal.to(tl.int32) << 16), 0)  # two counts, each below 2^16
        larger_until, equals_until = larger_before + (both & 0xFFFF), equals_before + (both >> 16)
        taken = larger | (equal & (equals_until <= need))
        to = tl.load(firsts + owner) + larger_until + tl.minimum(equals_until, need) - 1
        tl.store(taken_places + to, place, mask=taken)
        tl.store(taken_values + to, w, mask=taken)
        tl.store(ends + owner + tl.zeros_like(place), place + 1, mask=equal & (equals_until == need))  # of one entry
        larger_before += tl.sum(larger.to(tl.int32), 0)
        equals_before += tl.sum(equal.to(tl.int32), 0)


@dataclass(frozen=True)
class Chosen:
    """Which entries of each tensor travel: those above its threshold, and the first `needs` of those equal to it."""

    candidates: Candidates
    thresholds: Tensor  # (tensors,) int32: magnitudes
    needs: Tensor  # (tensors,) int32

    def take(self, places: Tensor, values: Tensor, status: Tensor) -> Tensor:
        """Write places and values, ascending; nothing where something was reported.

        Returns the place behind the last entry that was taken among those equal to the threshold: (tensors,) int32,
        zero where none was.
        """
        candidates, spans, blocks = self.candidates, self.candidates.spans, self.candidates.spans.blocks
        own = blocks.starts, blocks.lengths, blocks.owners, candidates.starts, candidates.lengths
        numbers = torch.empty(2, len(blocks), dtype=torch.int32, device=places.device)
        ends = torch.zeros_like(self.needs)
        grid = (len(blocks),)
        _count[grid](*candidates.arguments, *own, self.thresholds, numbers, len(blocks), tile=TILE, **EXACT)
        _take[grid](
            *candidates.arguments, *own, candidates.places, self.thresholds, self.needs,
            numbers.cumsum(1, dtype=torch.int32), len(blocks), spans.firsts, spans.first_blocks, status, places, values,
            ends, tile=TILE, **EXACT,
        )  # fmt: skip
        return ends
