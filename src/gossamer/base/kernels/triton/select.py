"""Selection of the entries to send, on a GPU: x is read once, and once more if there is a residual.

- `largest` reads x and residual.before once to gather candidates, which are few, in room that depends on sizes and
  counts; the k largest are selected from these. It reads both once more to write residual.after: only after all values
  are known to be finite, as a residual in place could not be restored.
- `above` does the same. If it finds more than it has room for it starts again as `largest`.
- `largest_with_momentum` reads x and momentum.before once to write momentum.after, and continues with it in place of x;
  with Nesterov's it writes that x.

In addition, a sample of at most 16384 entries of each tensor is read. If its bound was a bad one, or more entries are
equal to the k-th than there is room for, a tensor is read five times more; only twice more if these are zeros.

Other dtypes than float32, bfloat16 or float16 with float32 residuals use plain torch, and so do unsupported sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference import select
from gossamer.base.kernels.reference.residual import Residual, both
from gossamer.base.kernels.triton.candidates import Candidates, complete, fitting, gathered, seen
from gossamer.base.kernels.triton.launch import EXACT, TILE, serves, tiles
from gossamer.base.kernels.triton.noise import mixed
from gossamer.base.kernels.triton.spans import SAMPLE, WARPS, Spans, span, spans
from gossamer.base.kernels.triton.status import expect_finite, fresh
from gossamer.base.kernels.triton.wanted import magnitude, raw, tensors_of, wanted, widened

NAN = 0x7FFFFFFF  # a magnitude that is above those of all numbers


def largest(
    x: Tensor, sizes: Sequence[int], counts: Sequence[int], residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """As reference.select.largest."""
    lying = spans(len(x), sizes, counts, x.device) if _serves(x, residual) else None
    if lying is None:
        return select.largest(x, sizes, counts, residual)
    return _largest(raw(x), lying, residual)


def largest_with_momentum(
    x: Tensor,
    sizes: Sequence[int],
    counts: Sequence[int],
    rate: float,
    momentum: Residual,
    residual: Residual,
    *,
    nesterov: bool = False,
    masked: bool = True,
) -> tuple[Tensor, Tensor]:
    """As reference.select.largest_with_momentum."""
    served = _serves(x, residual) and _serves(x, momentum)
    lying = spans(len(x), sizes, counts, x.device) if served else None
    if lying is None:
        return select.largest_with_momentum(
            x, sizes, counts, rate, momentum, residual, nesterov=nesterov, masked=masked
        )
    offered = accelerate(x, rate, momentum, nesterov=nesterov)
    return _largest(offered, lying, residual, momentum.after if masked else None)


def above(x: Tensor, threshold: float, room: int, residual: Residual | None = None) -> tuple[Tensor, Tensor]:
    """As reference.select.above. The host reads at once how many entries there are and whether all is finite."""
    if room < 0 or not (_serves(x, residual) and len(x)):
        return select.above(x, threshold, room, residual)
    lying, status, least = span(len(x), room, x.device), fresh(x.device), _magnitude(threshold)
    limit, bound = (torch.full_like(status, each) for each in (least, min(least + 1, NAN)))
    candidates = gathered(raw(x), tensors_of(residual)[0], lying, bound, status)
    wrong, found = torch.cat((status, candidates.found)).tolist()
    if wrong:
        expect_finite(status)
    if found > room:
        return largest(x, [len(x)], [room], residual)
    places, values = torch.empty(found, dtype=torch.int32, device=x.device), torch.zeros(room, device=x.device)
    chosen = Chosen(candidates, limit, torch.zeros_like(limit))
    _write(chosen, residual, places, values, status)
    return places, values


def _largest(
    x: Tensor, lying: Spans, residual: Residual | None, momentum: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    places = torch.empty(lying.total, dtype=torch.int32, device=x.device)
    values = torch.empty(lying.total, device=x.device)
    if not len(x):
        return places, values
    status, (before, _) = fresh(x.device), tensors_of(residual)
    candidates = gathered(x, before, lying, bounds(x, before, lying), status)
    _write(Chosen(candidates, *thresholds(candidates)), residual, places, values, status, momentum)
    expect_finite(status)
    return places, values


def _write(
    chosen: Chosen,
    residual: Residual | None,
    places: Tensor,
    values: Tensor,
    status: Tensor,
    momentum: Tensor | None = None,
) -> None:
    ends = chosen.take(places, values, status)
    if residual is not None:
        leave(residual, chosen, ends, status, momentum)


def _magnitude(threshold: float) -> int:
    """Return the value that compaction compares magnitudes with: all are above -1, and none is above that of NaN."""
    number = torch.tensor(threshold, dtype=torch.float32)
    if number.isnan():
        return NAN
    return -1 if number < 0 else int(number.abs().view(torch.int32))


def _serves(x: Tensor, residual: Residual | None) -> bool:
    buffers = both(residual)
    alike = all(each.shape == x.shape and each.dtype == torch.float32 for each in buffers)
    return alike and x.dim() == 1 and serves(x, *buffers)


# -- momentum: the average over steps, and the offered values, in one pass ---------------------------------------------


@triton.jit
def _accelerate(x, before, after, offered, rate, numel, nesterov: tl.constexpr, tile: tl.constexpr):
    place = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = place < numel
    number = widened(tl.load(x + place, mask=inside, other=0))
    speed = number + tl.load(before + place, mask=inside, other=0.0) * rate
    tl.store(after + place, speed, mask=inside)
    if nesterov:
        tl.store(offered + place, number + speed * rate, mask=inside)


def accelerate(x: Tensor, rate: float, momentum: Residual, *, nesterov: bool) -> Tensor:
    """Overwrite momentum.after with u' = x + rate momentum.before. Returns u', or x + rate u': (n,) float32."""
    offered = torch.empty_like(momentum.after) if nesterov else momentum.after
    if len(x):
        _accelerate[tiles(len(x))](
            raw(x), momentum.before, momentum.after, offered, float(rate), len(x), nesterov=nesterov, tile=TILE, **EXACT
        )
    return offered


# -- bounds: magnitudes that slightly more than the k largest entries of each tensor reach -----------------------------

# A program reads the sample of a tensor, one entry of every stride, at a random offset, and searches the largest
# magnitude that enough of them reach, bit by bit. The result is an estimate: callers count the entries above it.

LOW = 11  # bits of a magnitude that are left open: the bound is up to 1 in 4096 lower


@triton.jit
def _bound(x, before, starts, sizes, strides, ranks, bounds, low: tl.constexpr, sample: tl.constexpr):
    owner = tl.program_id(0)
    order, stride, rank = tl.arange(0, sample), tl.load(strides + owner), tl.load(ranks + owner)
    within = order * stride + (mixed(order.to(tl.uint32)) % stride.to(tl.uint32)).to(tl.int32)
    inside = within < tl.load(sizes + owner)
    key = magnitude(wanted(x, before, tl.load(starts + owner) + within, inside))
    key = tl.where(inside, key >> low, -1)
    bound = tl.zeros_like(rank)
    for bit in range(31 - low):
        higher = bound | (1 << (30 - low - bit))
        bound = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= rank, higher, bound)
    tl.store(bounds + owner, tl.maximum(bound << low, 1))


def bounds(x: Tensor, before: Tensor | None, spans: Spans) -> Tensor:
    """(tensors,) int32: magnitudes, of which no zero is one. The least where more are looked for than were sampled, or
    are no zeros; that of NaN where none is looked for."""
    found = torch.empty_like(spans.counts)
    if len(spans):
        _bound[(len(spans),)](
            x, before, spans.starts, spans.sizes, spans.strides, spans.ranks, found,
            low=LOW, sample=SAMPLE, num_warps=WARPS, **EXACT,
        )  # fmt: skip
    return found


# -- thresholds: the magnitude of the k-th largest entry of each tensor, digit by digit from the highest ---------------

# A pass counts how often each value of a digit occurs among the entries with the higher digits of the k-th largest one,
# known from the passes before. Counts are integers, so the order in which programs add them does not matter; the number
# of passes is fixed, and nothing is read on the host. A pass reads the candidates, and all entries of tensors with
# incomplete candidates. If fewer than k count, the k-th is a zero.

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


# -- compaction: entries above a magnitude, and the first of those equal to it, side by side in their order ------------

# Each block counts its own, a running sum over blocks gives their offsets, and each block writes them there: no program
# waits for another. A block's own are its run of candidates, or all its entries where those are not complete.


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


# -- remainder: the residual of w after the chosen entries are sent, in one pass ---------------------------------------


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
