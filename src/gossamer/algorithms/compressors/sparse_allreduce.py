"""Sparse all-reduce: each worker sums the sparse entries of one region, so traffic does not grow with the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf, sqrt

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.algorithms.compressors.base import mean_buffer_like, with_mean_in
from gossamer.algorithms.compressors.decoding import decode_received, expect_tensors, sent_by
from gossamer.algorithms.compressors.dense import Dense
from gossamer.algorithms.compressors.topk import Sparse, dearer_than_dense, expect_values, require_places
from gossamer.algorithms.compressors.wrapper import Wrapper
from gossamer.base import rng
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import (
    Residual,
    all_finite,
    coded_bytes,
    decode_places,
    encode_places,
    expect_summable,
    largest,
    scatter,
    scratch_like,
)
from gossamer.base.layout import FlatTensors, accumulation_dtype
from gossamer.base.ops import AllGather, AllToAll, Payload
from gossamer.errors import MalformedError, NotFinite, OutOfRange, require

# -- the region of each entry: the worker that sums it -----------------------------------------------------------------


BLOCK = 16  # adjacent entries of one region: a cache line
STEPS = 64  # between assignments of regions
LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Regions:
    """The assignment of entries to workers: in every group of `world` blocks each worker has one, at a random offset.

    Block b of group g is in the region of worker (b + turn(g)) % world. A row is the index of an entry in its region,
    block after block. So adjacent entries are distributed evenly, and so are columns, at any distance. The last group
    may be truncated.
    """

    numel: int
    world: int
    key: int = 0

    @classmethod
    def drawn(cls, x: FlatTensors, at: AggregationContext) -> Regions:
        """Return the regions of a step; equal on every rank and for `STEPS` steps."""
        key = rng.address(at.seed, at.step // STEPS, x.layout.names[0], "regions")
        return cls(x.layout.numel, at.world, key)

    @property
    def block(self) -> int:
        return max(1, min(BLOCK, self.numel // self.world))

    @property
    def span(self) -> int:
        """Entries in a group."""
        return self.world * self.block

    @property
    def rows(self) -> int:
        """Rows of the largest region."""
        return -(-self.numel // self.span) * self.block

    @property
    def least_members(self) -> int:
        """The fewest entries of a region, for any assignment."""
        return self.numel // self.span * self.block

    def turns(self, groups: Tensor) -> Tensor:
        """Return a number in [0, world) for each group, in any order; both int64.

        Mixes 32 bits, as counter_rng does.
        """
        mixed = (groups * 0x9E3779B9 + (self.key & LOW)) & LOW ^ (self.key >> 32)
        mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D & LOW
        return ((mixed ^ (mixed >> 13)) * self.world) >> 32

    def locate(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return (region, row) of each entry; all (k,) int64. float32 could not represent integers above 2^24."""
        groups, within = places // self.span, places % self.span
        owners = (within // self.block + self.turns(groups)) % self.world
        return owners, groups * self.block + within % self.block

    def of(self, rank: int, device: torch.device) -> Region:
        """Return a worker's region. Its entries, in ascending order, are in the order of their rows."""
        groups = torch.arange(self.rows // self.block, device=device)
        blocks = self.places(rank, groups * self.block) // self.block
        last = int(self.places(rank, torch.tensor(self.rows - self.block, device="cpu")))
        if last + self.block <= self.numel:
            return Region(blocks, self.block, slice(0, 0))
        return Region(blocks[:-1], self.block, slice(min(last, self.numel), self.numel))  # the last group is truncated

    def members(self, rank: int, device: torch.device) -> Tensor:
        """Return the entries of a worker's region, in the order of their rows: int64, ascending."""
        return self.of(rank, device).read(torch.arange(self.numel, device=device))

    def places(self, owners: Tensor | int, rows: Tensor) -> Tensor:
        """Return the entry of each row of a region, int64; those of a truncated last group may be beyond the end."""
        groups = rows // self.block
        blocks = (owners - self.turns(groups)) % self.world
        return groups * self.span + blocks * self.block + rows % self.block


@dataclass(frozen=True)
class Region:
    """One worker's entries: whole blocks, by number, and the entries of a truncated last block."""

    blocks: Tensor  # (m,) int64
    block: int
    tail: slice

    def read(self, flat: Tensor) -> Tensor:
        """Return the region's entries of flat: (n,), by row."""
        whole = self._blocks(flat).index_select(0, self.blocks).view(-1)
        return whole if self.tail.start == self.tail.stop else torch.cat([whole, flat[self.tail]])

    def write(self, flat: Tensor, values: Tensor) -> None:
        """Overwrite the region's entries of flat: (n,), by row."""
        whole = len(self.blocks) * self.block
        self._blocks(flat).index_copy_(0, self.blocks, values[:whole].view(-1, self.block))
        flat[self.tail] = values[whole:]

    def clear(self, flat: Tensor) -> None:
        """Set the region's entries of flat: (n,) to zero."""
        self._blocks(flat).index_fill_(0, self.blocks, 0)
        flat[self.tail] = 0

    def _blocks(self, flat: Tensor) -> Tensor:
        return flat[: len(flat) // self.block * self.block].view(-1, self.block)


# -- the compressor ----------------------------------------------------------------------------------------------------

DEVIATIONS = 2  # standard deviations of room for a region that receives more entries than the average one


@dataclass(frozen=True, repr=False)
class SparseSum(Wrapper):
    """Sparse all-reduce: worker j sums the entries of its region that `inner` selects, and broadcasts the largest.

    s = w_j + sum over the other workers i of the entries of w_i sent to j; answer = s/n where |s| is among the r
    largest, else 0
    law:    own is the sent entries, and w_j - (s - n answer) in the own region; so mean own = answer, exactly
    bytes:  (n-1) (4 + (c + r) itemsize + coded_bytes(c, R) + coded_bytes(r, R)), R entries a region, r = k/n of them,
            c = r + 2 sqrt(r); at most 24 k (n-1)/n where r >= 40, and never more than Dense
    source: Li & Hoefler 2022, PPoPP (Ok-Topk); sums that are not sent stay at the worker that computed them, as in
            Sharded

    Ok-Topk calls the two phases "split and reduce" and "balance and allgatherv". Together they cost about two messages
    of k entries for any number of workers n, while inner alone sends n-1 of them. Entries of a worker's own region need
    no selection and no communication. Selected entries beyond the room c stay in the residual of the worker that
    selected them, and sums that are not among the r largest in the residual of the worker that computed them. Without
    Feedback both are lost.

    Regions consist of blocks of adjacent entries, one of every n blocks for each worker, assigned at random and
    reassigned every 64 steps, so no pattern of large entries fills one region for long.

    Args:
        inner: a compressor that selects a fixed number of entries, such as TopK.

    Example:
        >>> gossamer.SparseSum(gossamer.TopK(density=0.01))
        SparseSum(TopK(density=0.01))
    """

    inner: Sparse

    def __post_init__(self) -> None:
        require(
            isinstance(self.inner, Sparse),
            f"SparseSum needs a compressor that selects a fixed number of entries, got {self.inner!r}. "
            "Write SparseSum(TopK(density=0.01)).",
        )

    @property
    def wants_feedback(self) -> bool:
        return self.inner.wants_feedback

    def denser(self) -> Sequence[SparseSum]:
        return [replace(self, inner=inner) for inner in self.inner.denser()]

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        if self._dearer_than_dense(x, at):
            return Dense().aggregate(x, state, at, out)
        wanted = scratch_like(x.flat, accumulation_dtype(x.flat.dtype)).copy_(x.flat)
        return self._summed(x, wanted, at, out)

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        if self._dearer_than_dense(x, at):
            return Dense().aggregate_compensated(x, residual, State(), at, out)
        wanted = torch.add(x.flat, residual.before, out=residual.after)
        return self._summed(x, wanted, at, out)

    def rooms(self, x: FlatTensors, world: int) -> tuple[int, int]:
        """Return (c, r): the most entries that a worker sends to another, and the number of sums that each worker
        sends.
        """
        regions, count = Regions(x.layout.numel, world), sum(self.inner.counts(x.layout.sizes))
        each = count / world
        sent = min(count, regions.rows, ceil(each + DEVIATIONS * sqrt(each)))
        return sent, min(regions.least_members, ceil(each))

    def _dearer_than_dense(self, x: FlatTensors, at: AggregationContext) -> bool:
        """Also true if a worker would have no region."""
        if x.layout.numel < at.world:
            return True
        rows, itemsize = Regions(x.layout.numel, at.world).rows, accumulation_dtype(x.flat.dtype).itemsize
        both = sum(room * itemsize + coded_bytes(room, rows) for room in self.rooms(x, at.world))
        return dearer_than_dense(4 + both, x, at)

    def _summed(self, x: FlatTensors, wanted: Tensor, at: AggregationContext, out: Tensor | None) -> Aggregation:
        """Compute the mean of wanted: (n,), and leave the unsent part in `wanted`."""
        require_places(x.layout)
        room, kept = self.rooms(x, at.world)
        regions = Regions.drawn(x, at)
        region = regions.of(at.rank, wanted.device)
        local = region.read(wanted)
        if not all_finite(local):
            raise NotFinite("the input has a value that is not finite, or too large to be added to the residual")
        region.clear(wanted)
        entries = _entries(regions, *self.inner.select(FlatTensors(wanted, x.layout), at), room)
        wanted.index_fill_(0, entries.places, 0)
        received = yield AllToAll(entries.messages(regions.rows, room))
        left = scratch_like(local)
        finite = decode_received(partial(_added, local, regions.rows, room), received, None, left, at)
        answers = yield AllGather(_largest_sums(left, finite, regions, kept))
        mean = mean_buffer_like(x.flat, out)
        if mean.is_meta:
            return with_mean_in(AggregationResult(mean=mean, own_contribution=lambda: torch.empty_like(mean)), out)
        addable = [_can_be_added(answer, kept, mean, rank, at) for rank, answer in enumerate(answers)]
        places, position = _sent_sums(answers, regions, kept, at)
        scatter(list(zip(places, position, strict=True)), mean)
        region.write(wanted, left)
        numel = x.layout.numel

        def own() -> Tensor:
            part = left.new_zeros(numel)
            part.index_copy_(0, entries.places, entries.values)
            region.write(part, local - left)
            return part

        return with_mean_in(AggregationResult(mean=mean, own_contribution=own, finite=all(addable)), out)


@dataclass(frozen=True)
class Entries:
    """The entries that one worker sends, sorted by region and within a region by row.

    places: (s,) int64, rows: (s,) int32, values: (s,); counts: number of entries for each region.
    """

    places: Tensor
    rows: Tensor
    values: Tensor
    counts: tuple[int, ...]

    def messages(self, rows: int, room: int) -> tuple[Payload, ...]:
        """Return the payload for each worker: the number of entries, and values and rows padded to `room`."""
        if self.values.is_meta:  # to count bytes, one message represents all
            count = self.values.new_empty(1, dtype=torch.int32)
            blank = self.rows.new_empty(room)
            return ((count, self.values.new_empty(room), encode_places(blank, rows, room)),) * len(self.counts)
        used = torch.tensor(self.counts, dtype=torch.int32, device=self.values.device).split(1)
        parts = zip(used, self.values.split(self.counts), self.rows.split(self.counts), strict=True)
        return tuple(
            (count, pad(value, (0, room - len(value))), encode_places(row, rows, room)) for count, value, row in parts
        )


def _entries(regions: Regions, places: Tensor, values: Tensor, room: int) -> Entries:
    """Sort entries at places: (k,) int32 by region and keep the `room` largest of each; ties go to the lower index."""
    found = places.long()
    owners, rows = regions.locate(found)
    owners, order = torch.sort(owners, stable=True)
    counts = [room] * regions.world if found.is_meta else torch.bincount(owners, minlength=regions.world).tolist()
    fitting = tuple(min(count, room) for count in counts)
    fits, values = largest(values[order], counts, fitting)
    chosen = order[fits]
    return Entries(found[chosen], rows[chosen].int(), values, fitting)


def _added(local: Tensor, rows: int, room: int, received: Sequence[Payload], sums: Tensor) -> None:
    """Overwrite `sums`: (m,) with mine plus the received entries, in the order of ranks. Raises MalformedError."""
    expect_tensors(received, 3)
    for _, values, _ in received:
        expect_values(values, room, local)
        expect_summable(values, len(received))
    entries = [_received(payload, rows, room, len(local)) for payload in received]
    scatter(entries, sums.copy_(local), onto=True)


def _received(payload: Payload, rows: int, room: int, members: int) -> tuple[Tensor, Tensor]:
    """Return (rows, values) of the entries in a message. Raises MalformedError."""
    used, values, coded = payload
    if used.dtype != torch.int32 or used.shape != (1,):
        raise MalformedError(f"expected one int32, the number of entries, got {tuple(used.shape)} in {used.dtype}")
    count = room if used.is_meta else int(used)
    found = decode_places(coded, count, rows, room)
    if count and not found.is_meta and int(found[-1]) >= members:
        raise MalformedError(f"an entry has a row beyond the {members} of this region")
    return found, values[:count]


def _largest_sums(sums: Tensor, finite: bool, regions: Regions, kept: int) -> Payload:
    """Encode the `kept` largest of sums: (m,) as means with their rows, and set them to zero in `sums`.

    Only this worker knows whether a sum overflowed. It reports that to all ranks by values that cannot be summed.
    """
    try:
        rows, values = largest(sums, [len(sums)], [kept])
    except NotFinite:
        finite = False
    if not finite:
        rows, values = torch.arange(kept, dtype=torch.int32, device=sums.device), sums.new_full((kept,), inf)
    sums.index_fill_(0, rows.long(), 0)
    return (values / regions.world).clamp(max=torch.finfo(values.dtype).max), encode_places(rows, regions.rows)


def _can_be_added(answer: Payload, kept: int, out: Tensor, rank: int, at: AggregationContext) -> bool:
    """Whether a worker sent sums, and not the values that report an overflow. Raises MalformedError."""
    try:
        with sent_by(rank, at):
            expect_tensors([answer], 2)
            expect_values(answer[0], kept, out)
            expect_summable(answer[0], 1)
    except OutOfRange:
        return False
    return True


def _rows(coded: Tensor, rows: int, kept: int, rank: int, at: AggregationContext) -> Tensor:
    """Decode the rows of the sums that a worker sent: (kept,) int64. Raises MalformedError."""
    with sent_by(rank, at):
        return decode_places(coded, kept, rows).long()


def _sent_sums(
    answers: Sequence[Payload], regions: Regions, kept: int, at: AggregationContext
) -> tuple[Tensor, Tensor]:
    """Return (places, values) of the sums that each worker sent: (world, r) int32, ascending, and (world, r).

    A truncated group has rows without a place; their values become zero. Raises MalformedError.
    """
    rows = torch.stack([_rows(coded, regions.rows, kept, rank, at) for rank, (_, coded) in enumerate(answers)])
    places = regions.places(torch.arange(regions.world, device=rows.device)[:, None], rows)
    values = torch.stack([values for values, _ in answers])
    last = regions.numel - 1
    return places.clamp(max=last).int(), torch.where(places <= last, values, 0)
