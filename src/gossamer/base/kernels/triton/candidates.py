"""Candidates: the entries of each tensor that reach a bound, gathered in one pass, with their indices, in a small
buffer.

Each block writes a run, in order, at an offset from an atomic sum: runs are in the order in which programs finished,
and readers that need the order of blocks iterate over them. A tensor's candidates are complete if there are at least as
many as entries to send, and no more than the room. Otherwise readers use all entries of that tensor: slower, with the
same bits. Only the device knows which case applies. If all nonzero entries were gathered, they determine the k-th
largest magnitude even if they are fewer than k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.triton.launch import EXACT
from gossamer.base.kernels.triton.spans import WARPS, Spans
from gossamer.base.kernels.triton.status import expect_sendable
from gossamer.base.kernels.triton.wanted import magnitude, wanted


@triton.jit
def _gather(
    x, before, starts, lengths, owners, bounds, rooms, first_rooms, found, places, values, run_starts, run_lengths,
    status, even: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    within, owner = tl.arange(0, block), tl.load(owners + number)
    place = tl.multiple_of(tl.load(starts + number), even) + within
    inside = within < tl.multiple_of(tl.load(lengths + number), even)
    w = wanted(x, before, place, inside)
    expect_sendable(w, status)
    key = magnitude(w)
    near = inside & (key >= tl.load(bounds + owner))
    order = tl.cumsum(near.to(tl.int32), 0) - 1
    length, room, first_room = tl.sum(near.to(tl.int32), 0), tl.load(rooms + owner), tl.load(first_rooms + owner)
    start = tl.atomic_add(found + owner, length, sem="relaxed")
    kept, to = near & (start + order < room), first_room + start + order
    tl.store(places + to, place, mask=kept)
    tl.store(values + to, w, mask=kept)
    tl.store(run_starts + number, first_room + start)
    tl.store(run_lengths + number, length)


@triton.jit
def complete(found, counts, rooms, owner):
    """Within a kernel: whether the candidates of a tensor hold all that can travel of it."""
    return (tl.load(found + owner) >= tl.load(counts + owner)) & fitting(found, rooms, owner)


@triton.jit
def fitting(found, rooms, owner):
    """Within a kernel: whether there was room for all candidates of a tensor."""
    return tl.load(found + owner) <= tl.load(rooms + owner)


@triton.jit
def seen(x, before, values, start, within, length, kept):
    """w from `start` on, among the candidates if `kept`, a scalar, is set, else among all entries; zero from `length`
    on."""
    candidate = tl.load(values + start + within, mask=within < tl.where(kept, length, 0), other=0.0)
    whole = within < tl.where(kept, 0, length)
    return tl.where(kept, candidate, wanted(x, before, start + within, whole))


@dataclass(frozen=True)
class Candidates:
    """Those of w = x + before, or x."""

    x: Tensor
    before: Tensor | None
    spans: Spans
    bounds: Tensor  # (tensors,) int32: magnitudes
    found: Tensor  # (tensors,) int32: how many reach the bound, whether there was room or not
    places: Tensor  # (room,) int32
    values: Tensor  # (room,) float32
    starts: Tensor  # (blocks,) int32: where each block's run begins
    lengths: Tensor  # (blocks,) int32

    @property
    def arguments(self) -> tuple[Tensor | None, ...]:
        """The first arguments of every kernel that reads them."""
        return self.x, self.before, self.values, self.found, self.spans.counts, self.spans.rooms


def gathered(x: Tensor, before: Tensor | None, spans: Spans, bounds: Tensor, status: Tensor) -> Candidates:
    """Return the candidates that reach bounds. Reads x and `before` once. Reports values that are not finite."""
    blocks, found = spans.blocks, torch.zeros_like(spans.counts)
    places = torch.empty(spans.room, dtype=torch.int32, device=x.device)
    values, starts = torch.empty(spans.room, device=x.device), torch.empty_like(blocks.starts)
    candidates = Candidates(x, before, spans, bounds, found, places, values, starts, torch.empty_like(starts))
    _gather[(len(blocks),)](
        x, before, blocks.starts, blocks.lengths, blocks.owners, bounds, spans.rooms, spans.first_rooms, found, places,
        values, starts, candidates.lengths, status,
        even=spans.even, block=blocks.block, num_warps=WARPS, **EXACT,
    )  # fmt: skip
    return candidates
