"""Compaction: entries above a magnitude, and the first of those equal to it, side by side in their order.

Each block counts its own, a running sum over blocks says where they go, and each block writes them there: no program
waits for another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.kernels.reference.residual import Residual
from gossamer.kernels.triton.launch import EXACT
from gossamer.kernels.triton.spans import WARPS, Spans
from gossamer.kernels.triton.status import NOT_FINITE, report
from gossamer.kernels.triton.wanted import INFINITE, magnitude, wanted


@triton.jit
def _count(
    x, before, starts, lengths, owners, thresholds, numbers, blocks, status,
    owes: tl.constexpr, low: tl.constexpr, bit: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    within = tl.arange(0, block)
    inside = within < tl.load(lengths + number)
    key = magnitude(wanted(x, before if owes else None, tl.load(starts + number) + within, inside))
    report(status, key >= INFINITE, bit)
    threshold = tl.load(thresholds + tl.load(owners + number)) << low
    tl.store(numbers + number + 1, tl.sum((inside & (key > threshold)).to(tl.int32), 0))
    tl.store(numbers + blocks + number + 2, tl.sum((inside & (key == threshold)).to(tl.int32), 0))


@triton.jit
def _take(
    x, before, after, momentum, starts, lengths, owners, thresholds, needs, sums, blocks, firsts, first_blocks, places,
    values, status, owes: tl.constexpr, masks: tl.constexpr, low: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    within, owner = tl.arange(0, block), tl.load(owners + number)
    place = tl.load(starts + number) + within
    inside = within < tl.where(tl.load(status) == 0, tl.load(lengths + number), 0)  # else nothing is written
    w = wanted(x, before if owes else None, place, inside)
    key, threshold, need = magnitude(w), tl.load(thresholds + owner) << low, tl.load(needs + owner)
    above, equals = sums, sums + blocks + 1
    first_block = tl.load(first_blocks + owner)
    equals_before = tl.load(equals + number) - tl.load(equals + first_block)
    still = tl.maximum(need - equals_before, 0)
    larger, equal = inside & (key > threshold), inside & (key == threshold)
    both = tl.cumsum(larger.to(tl.int32) + (equal.to(tl.int32) << 16), 0)  # two counts, each below 2^16
    taken = larger | (equal & ((both >> 16) <= still))
    first = tl.load(firsts + owner) + tl.load(above + number) - tl.load(above + first_block)
    to = first + tl.minimum(equals_before, need) + (both & 0xFFFF) + tl.minimum(both >> 16, still) - 1
    tl.store(places + to, place, mask=taken)
    tl.store(values + to, w, mask=taken)
    if owes:
        tl.store(after + place, tl.where(taken, 0.0, w), mask=inside)
    if masks:
        tl.store(momentum + place, tl.zeros_like(w), mask=taken)


@dataclass(frozen=True)
class Chosen:
    """Which entries of each tensor travel: those above its threshold, and the first `needs` of those equal to it."""

    spans: Spans
    thresholds: Tensor  # (tensors,) int32: a magnitude without its `low` lowest bits, which are zero everywhere
    needs: Tensor  # (tensors,) int32
    low: int = 0

    def sums(self, x: Tensor, before: Tensor | None, status: Tensor) -> Tensor:
        """(2, blocks + 1) int32: how many entries above and equal to the threshold lie before each block. Reports what
        is not finite."""
        table = self.spans.table
        numbers = torch.zeros(2, len(table) + 1, dtype=torch.int32, device=x.device)
        _count[(len(table),)](
            x, x if before is None else before, table.starts, table.lengths, table.owners, self.thresholds, numbers,
            len(table), status,
            owes=before is not None, low=self.low, bit=NOT_FINITE, block=table.block, num_warps=WARPS, **EXACT,
        )  # fmt: skip
        return numbers.cumsum(1, dtype=torch.int32)

    def take(
        self,
        x: Tensor,
        residual: Residual | None,
        sums: Tensor,
        places: Tensor,
        values: Tensor,
        status: Tensor,
        momentum: Tensor | None = None,
    ) -> None:
        """Write places and values, what is owed then, and zeros into `momentum` where an entry was taken; nothing where
        something was reported."""
        table, spans = self.spans.table, self.spans
        before, after = (x, x) if residual is None else (residual.before, residual.after)
        _take[(len(table),)](
            x, before, after, x if momentum is None else momentum, table.starts, table.lengths, table.owners,
            self.thresholds, self.needs, sums, len(table), spans.firsts, spans.blocks, places, values, status,
            owes=residual is not None, masks=momentum is not None, low=self.low, block=table.block, num_warps=WARPS,
            **EXACT,
        )  # fmt: skip
