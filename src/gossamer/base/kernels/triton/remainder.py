"""Remainders: the residual of w after the chosen entries are sent, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference.residual import Residual
from gossamer.base.kernels.triton.compaction import Chosen
from gossamer.base.kernels.triton.launch import EXACT
from gossamer.base.kernels.triton.spans import WARPS
from gossamer.base.kernels.triton.wanted import magnitude, wanted


@triton.jit
def _leave(
    x, before, after, momentum, starts, lengths, owners, thresholds, ends, status,
    even: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    within, owner = tl.arange(0, block), tl.load(owners + number)
    place = tl.multiple_of(tl.load(starts + number), even) + within
    length = tl.multiple_of(tl.load(lengths + number), even)
    inside = within < tl.where(tl.load(status) == 0, length, 0)  # else nothing is written
    w = wanted(x, before, place, inside)
    key, threshold = magnitude(w), tl.load(thresholds + owner)
    taken = inside & ((key > threshold) | ((key == threshold) & (place < tl.load(ends + owner))))
    tl.store(after + place, tl.where(taken, 0.0, w), mask=inside)
    if momentum is not None:
        tl.store(momentum + place, tl.zeros_like(w), mask=taken)


def leave(residual: Residual, chosen: Chosen, ends: Tensor, status: Tensor, momentum: Tensor | None = None) -> None:
    """Write to residual.after w, or zero where an entry travels: its magnitude is above the threshold, or equal to it
    and its place before the end; and zeros into `momentum` there. Nothing where something was reported.

    Reads x and residual.before once. momentum: may be x.
    """
    x, spans, blocks = chosen.candidates.x, chosen.candidates.spans, chosen.candidates.spans.blocks
    _leave[(len(blocks),)](
        x, residual.before, residual.after, momentum, blocks.starts, blocks.lengths, blocks.owners, chosen.thresholds,
        ends, status, even=spans.even, block=blocks.block, num_warps=WARPS, **EXACT,
    )  # fmt: skip
