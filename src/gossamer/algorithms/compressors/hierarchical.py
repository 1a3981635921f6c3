"""Hierarchical compression: exact means within a node, compressed means between the nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import nan, prod

import torch
from torch import Tensor

from gossamer.algorithms.compressors.base import (
    Compressor,
    aggregate_finite,
    mean_buffer_like,
    with_mean_in,
)
from gossamer.algorithms.compressors.decoding import expect_tensors, sent_by
from gossamer.algorithms.compressors.route import Route
from gossamer.algorithms.compressors.sharded import is_group_residual
from gossamer.base import rng
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import scratch_for, scratch_like, within_range
from gossamer.base.kernels.reference.segments import expect
from gossamer.base.layout import FlatTensors, Layout, Slot, accumulation_dtype, contiguous_stride
from gossamer.base.ops import AllGather, AllToAll, InGroup, Payload, Script, coalesce, in_group
from gossamer.base.term import Inelastic
from gossamer.errors import NotFinite, RecipeError, require

PREFIX = "place"  # of the state keys of a place
FILLED = 16  # a tensor is cut between rows if it has this many rows per row of padding


@dataclass(frozen=True, repr=False)
class Hierarchical(Compressor):
    """Average exactly within each node, and by `between` among the nodes, where each worker of a node handles a part.

    rank = node per_node + place;  m_p = mean over the node of x_p;  answer_p = mean over nodes of C(m_p)
    law:    own_p = x_p + per_node (C(m_p) - m_p) where the place is p, else x_p, so that mean own = answer
    bytes:  2 (per_node - 1)/per_node N itemsize within a node; between nodes C's for N/per_node entries, and a byte to
            each other node
    source: Goyal et al. 2017, arXiv:1706.02677 (the three phases)

    The phases are a reduce-scatter within the node, an aggregation by `between` among the workers with the same place,
    and an all-gather within the node. Each tensor is cut separately, so no state depends on the other tensors of its
    bucket: into blocks of rows, or of entries if it has few rows, padded with zeros to equal lengths. Place p keeps the
    state of `between` for the p-th pieces, under "place<p>." A single node sends nothing between nodes and has no
    state.

    Args:
        between: compressor between the nodes.
        per_node: workers per node; the number of workers must be a multiple of it.

    Example:
        >>> gossamer.Hierarchical(gossamer.Int8(), per_node=4)
        Hierarchical(Int8(), per_node=4)
    """

    between: Compressor
    per_node: int = 8

    def __post_init__(self) -> None:
        require(self.per_node >= 1, f"per_node must be a number of workers, 1 or more, got {self.per_node}")

    @property
    def inelastic(self) -> Inelastic:
        return Inelastic(
            "nodes, and the part of the tensors that each of their workers handles, would change with every worker "
            "that joins or leaves",
            "Leave out Hierarchical",
        )

    @property
    def handles_every_shape(self) -> bool:
        return self.between.handles_every_shape

    def completed(self, complete: Callable[[Compressor], Compressor]) -> Compressor:
        """Apply Route to the compressor between nodes; within a node every tensor is sent uncompressed."""
        inner = self.between.completed(complete)
        return replace(self, between=inner if inner.handles_every_shape else Route(inner))

    def group(self, slot: Slot) -> int:
        return self.between.group(_piece(slot, self.per_node, 0))

    def suits(self, shape: Sequence[int]) -> bool:
        whole = Slot("", tuple(shape), 0, contiguous_stride(shape))
        return self.between.suits(_piece(whole, self.per_node, 0).shape)

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        where = _Place.of(at, self.per_node)
        part = _part(like.layout, where.size)
        if where.nodes == 1 or not part.numel:
            return State()
        blank = FlatTensors.zeros(part, dtype=accumulation_dtype(like.flat.dtype), device=like.flat.device)
        state = self.between.init(blank, where.at(at))
        if any(map(is_group_residual, state)):
            raise RecipeError(
                f"{self.between!r} shards the tensors among nodes again and keeps a residual per shard, which cannot "
                "be redistributed if the number of workers changes. Use its inner compressor without the sharding, "
                f"such as Hierarchical(Feedback(Int8()), per_node={self.per_node})."
            )
        return State({where.prefix + key: packed for key, packed in state.items()})

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        if not within_range(x.flat, at.world):
            raise NotFinite("the input has a value that is not finite, or too large for the sum over the group")
        where = _Place.of(at, self.per_node)
        part = _part(x.layout, where.size)
        mean = mean_buffer_like(x.flat, out)
        if not part.numel:
            return with_mean_in(AggregationResult(mean=mean, own_contribution=lambda: x.flat), out)
        received = yield InGroup(where.inside, AllToAll(tuple((row,) for row in _cut(x, part, where.size))))
        inside = _mean(_rows(received, x.flat.dtype, part.numel, where.inside, at))
        staged = yield from self._between(FlatTensors(inside, part), state.part(where.prefix), where, at)
        answer = staged.mean if staged.finite else torch.full_like(inside, nan)
        answers = yield InGroup(where.inside, AllGather((answer,)))
        rows = _rows(answers, answer.dtype, part.numel, where.inside, at)
        _joined(rows, part, x.layout, mean)
        own = partial(_own, x, part, inside, staged, where)
        kept = State({where.prefix + key: packed for key, packed in staged.next_state.items()})
        return with_mean_in(
            AggregationResult(mean=mean, own_contribution=own, next_state=kept, finite=_all_finite(rows)), out
        )

    def _between(self, x: FlatTensors, state: State, where: _Place, at: AggregationContext) -> Aggregation:
        """Compute the mean over nodes of x.flat: (n,), one node's mean.

        If `between` cannot send its input it sends zeros, and a flag byte reports that to the same place of all nodes.
        """
        if where.nodes == 1:
            return AggregationResult(mean=x.flat, own_contribution=lambda: x.flat)
        lost: list[bool] = []
        aggregation = aggregate_finite(self.between, x, state, where.at(at), None, lambda: lost.append(True))
        across_result: tuple[AggregationResult, bool] = yield from in_group(
            where.across, coalesce([aggregation, _all_fine(lost, x.flat, where, at)])
        )
        staged, fine = across_result
        return replace(staged, finite=staged.finite and fine)


def _all_fine(lost: Sequence[bool], like: Tensor, where: _Place, at: AggregationContext) -> Script:
    """Whether no rank lost its input; known once all have started."""
    received = yield AllGather((like.new_full((1,), bool(lost), dtype=torch.uint8),))
    flags = _rows(received, torch.uint8, 1, where.across, at)
    return like.is_meta or not any(bool(flag.item()) for flag in flags)


def _rows(
    received: Sequence[Payload], dtype: torch.dtype, count: int, ranks: Sequence[int], at: AggregationContext
) -> list[Tensor]:
    """Return the tensor that each rank sent: (count,) of dtype. Raises MalformedError."""
    for rank, payload in zip(ranks, received, strict=True):
        with sent_by(rank, at):
            expect_tensors([payload], 1)
            expect(payload[0], dtype, count)
    return [row for (row,) in received]


def _all_finite(answers: Sequence[Tensor]) -> bool:
    """Whether all places sent finite values: a place whose mean is not finite sends NaN in every entry."""
    return all(within_range(row, 1) for row in answers)


@dataclass(frozen=True)
class _Place:
    """The position of a worker: place `place` of `size` in node `node` of `nodes`."""

    node: int
    place: int
    size: int
    nodes: int

    @classmethod
    def of(cls, at: AggregationContext, per_node: int) -> _Place:
        if at.world == 1:
            return cls(0, 0, 1, 1)
        if at.world % per_node:
            raise RecipeError(
                f"{at.world} workers cannot be divided into nodes of {per_node}, so the last node would be "
                f"incomplete. Run a multiple of {per_node} workers, or write per_node={_divisor(at.world, per_node)}."
            )
        return cls(*divmod(at.rank, per_node), per_node, at.world // per_node)

    @property
    def inside(self) -> tuple[int, ...]:
        """The ranks of the node."""
        return tuple(range(self.node * self.size, (self.node + 1) * self.size))

    @property
    def across(self) -> tuple[int, ...]:
        """The ranks at the same place of all nodes."""
        return tuple(range(self.place, self.nodes * self.size, self.size))

    @property
    def prefix(self) -> str:
        """The prefix of this place's state keys; other places keep state of other pieces."""
        return f"{PREFIX}{self.place}."

    def at(self, at: AggregationContext) -> AggregationContext:
        """The context of `between`.

        Pieces of one tensor share its name, so the seed includes the place to separate noise.
        """
        seed = rng.address(at.seed, "place", self.place)
        return replace(at, seed=seed, rank=self.node, world=self.nodes)


def place_of(key: str) -> int | None:
    """Return the place whose pieces a state key belongs to; None for the state of whole tensors.

    The pieces of place p start at p times their length.
    """
    first = next((part for part in key.split(".") if part.startswith(PREFIX)), None)
    return None if first is None else int(first.removeprefix(PREFIX))


def _divisor(world: int, most: int) -> int:
    return max(size for size in range(1, min(world, most) + 1) if world % size == 0)


def _mean(rows: Sequence[Tensor]) -> Tensor:
    """Return the mean of a node's tensors, added in the order of its ranks in at least float32: (m,)."""
    first, *others = rows
    mean = scratch_like(first, accumulation_dtype(first.dtype)).copy_(first)
    for row in others:
        mean.add_(row)
    return mean.div_(len(rows))


# -- pieces of tensors -------------------------------------------------------------------------------------------------


def _piece(slot: Slot, size: int, offset: int) -> Slot:
    """Return the slot of one of `size` equal pieces of a tensor, at `offset`: whole rows if that pads little."""
    axes = [axis for axis, count in enumerate(slot.shape) if count > 1]
    if axes:
        axis = max(axes, key=lambda axis: slot.stride[axis])  # the outermost in memory
        count = slot.shape[axis]
        each = -(-count // size)
        if FILLED * (each * size - count) <= count:
            return Slot(slot.name, (*slot.shape[:axis], each, *slot.shape[axis + 1 :]), offset, slot.stride)
    return Slot(slot.name, (-(-prod(slot.shape) // size),), offset, (1,))


@lru_cache(maxsize=256)
def _part(layout: Layout, size: int) -> Layout:
    """Return the layout of one place's pieces, equal at every place. Tensors without entries are omitted."""
    slots: list[Slot] = []
    offset = 0
    for slot in layout:
        if slot.numel:
            slots.append(_piece(slot, size, offset))
            offset = slots[-1].end
    return Layout(tuple(slots))


def _cut(x: FlatTensors, part: Layout, size: int) -> Sequence[Tensor]:
    """Return each place's pieces of all tensors, concatenated: `size` tensors of (m,)."""
    rows = scratch_for(size * part.numel, x.flat.dtype, x.flat.device).view(size, part.numel)
    for piece in part:
        span = x.layout.by_name[piece.name].flat_view(x.flat)
        full, rest = divmod(span.numel(), piece.numel)
        block = rows[:, piece.offset : piece.end]
        block[:full] = span[: full * piece.numel].view(full, piece.numel)
        if full < size:
            block[full:] = 0
            block[full, :rest] = span[full * piece.numel :]
    return rows.unbind()


def _joined(rows: Sequence[Tensor], part: Layout, layout: Layout, out: Tensor) -> None:
    """Overwrite `out`: (n,) with all tensors, from the pieces of each place: (m,) each."""
    blocks = torch.stack(list(rows))
    for piece in part:
        span = layout.by_name[piece.name].flat_view(out)
        span.copy_(blocks[:, piece.offset : piece.end].reshape(-1)[: span.numel()])


def _own(x: FlatTensors, part: Layout, mean: Tensor, staged: AggregationResult, where: _Place) -> Tensor:
    """Return x, plus at this place the compression error of the node's mean times the number of ranks that share it:
    (n,).
    """
    whole = x.flat.to(accumulation_dtype(x.flat.dtype), copy=True)
    error = (staged.own - mean).mul_(where.size)
    for piece in part:
        span = x.layout.by_name[piece.name].flat_view(whole)[where.place * piece.numel :][: piece.numel]
        span.add_(piece.flat_view(error)[: span.numel()])
    return whole
