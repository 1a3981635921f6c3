"""Sharded aggregation: every worker averages a part in a reduce-scatter, and all-gathers it encoded again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.algorithms.compressors.base import Codec, mean_buffer_like, with_mean_in
from gossamer.algorithms.compressors.decoding import decode_heard, expect_tensors
from gossamer.algorithms.compressors.feedback_rules import RESIDUAL, debtor
from gossamer.algorithms.compressors.wrapper import Wrapper
from gossamer.base import rng
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.identity import Itself
from gossamer.base.kernels import Residual, scratch_like
from gossamer.base.kernels.reference.segments import expect
from gossamer.base.layout import FlatTensors, Layout, accumulation_dtype
from gossamer.base.ops import AllGather, AllToAll, Payload
from gossamer.errors import NotFinite

OWED = "owed"


def is_owed(key: str) -> bool:
    """Whether a state's key is that of a part's debt; wrappers put prefixes before it."""
    return key.rpartition(".")[2] == OWED


def is_unsent(key: str) -> bool:
    """Whether a state's key is that of something still to be sent: a residual or a debt."""
    return key.rpartition(".")[2] in (RESIDUAL, OWED)


def settle(state: State, at: AggregationContext) -> None:
    """Move what the group owes itself into this worker's own memory, so that no memory depends on where parts lie.

    A worker's counts once in `workers`, so it takes `workers` times as much.
    """
    for key in filter(is_owed, state):
        place, sign = debtor(key.removesuffix(OWED), state)
        owed, whole = state[key].flat, state[place].flat
        start = min(at.rank * -(-len(whole) // at.world), len(whole))
        whole[start : start + len(owed)].add_(owed, alpha=sign * at.world)
        owed.zero_()


@dataclass(frozen=True, repr=False)
class Sharded(Wrapper):
    """A codec's reduce-scatter and all-gather: worker j averages the j-th part and encodes the mean again.

    m_j = mean over workers of C(x)_j, answer_j = C(m_j + owed_j), owed'_j = m_j + owed_j - answer_j
    law:    mean own = answer + owed' - owed; without Feedback around it nothing is owed, and own has that error instead
    bytes:  2 (workers - 1) M, M the largest part's message: about 2/workers of the codec's alone
    source: Seide et al. 2014, Interspeech; Tang et al. 2021, ICML (error feedback in both places)

    Parts have ceil(N / workers) entries, messages are filled up to the largest one's size. What is owed lies with the
    part's worker: N / workers more of at least float32, which take turns.
    """

    inner: Codec

    @property
    def wants_feedback(self) -> bool:
        return self.inner.wants_feedback

    def init_compensated(self, like: FlatTensors, at: AggregationContext) -> State:
        part = _parts(self.inner, Itself(like.layout), at.world, like.flat.dtype)[at.rank]
        return State(
            {OWED: FlatTensors.zeros(part.layout, dtype=accumulation_dtype(like.flat.dtype), device=like.flat.device)}
        )

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        return self._in_parts(x, None, None, at, out)

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        left = state.scratch(OWED)
        staged = yield from self._in_parts(x, residual, Residual(state[OWED].flat, left.flat), at, out)
        start = _parts(self.inner, Itself(x.layout), at.world, x.flat.dtype)[at.rank].start

        def share() -> Tensor:
            whole = left.flat.new_zeros(x.layout.numel)
            whole[start : start + len(left.flat)] = left.flat
            return whole

        return replace(staged, owes=share, next_state=State({OWED: left}))

    def _in_parts(
        self,
        x: FlatTensors,
        residual: Residual | None,
        owed: Residual | None,
        at: AggregationContext,
        out: Tensor | None,
    ) -> Aggregation:
        parts = _parts(self.inner, Itself(x.layout), at.world, x.flat.dtype)
        mine = parts[at.rank]
        sent = self._encode_parts(parts, x.flat, residual, at)
        heard = yield AllToAll(sent)
        agreed = scratch_like(mine.of(x.flat), accumulation_dtype(x.flat.dtype))
        finite = decode_heard(partial(self._decode, mine, divisor=at.world), heard, mine.layout, agreed, at)
        told = self._encode_mean(mine, agreed, finite, owed, _at(at, "mean", at.rank))
        like, lost = agreed.new_empty(0), agreed if owed is None else None
        del heard, agreed  # as large as the bucket together, and not needed while the answers travel
        answers = yield AllGather(told)
        mean = mean_buffer_like(x.flat, out)
        finite = True
        for rank, (part, payload) in enumerate(() if mean.is_meta else zip(parts, answers, strict=True)):
            into = part.of(mean)
            if not decode_heard(partial(self._decode, part), [payload], part.layout, into, at, rank):
                into.fill_(inf)
                finite = False
        if lost is not None:
            lost.sub_(mine.of(mean))
        own = partial(self._own, parts, sent, like, lost, at)
        return with_mean_in(AggregationResult(mean=mean, own_contribution=own, finite=finite), out)

    def _encode_parts(
        self, parts: Sequence[OwnedPart], flat: Tensor, residual: Residual | None, at: AggregationContext
    ) -> tuple[Payload, ...]:
        """What travels to each worker. For a price one message stands for all, which are equally long."""
        if flat.is_meta:
            first = parts[0]
            return (self._encode(first, first.of(flat), first.of_residual(residual), at),) * len(parts)
        return tuple(
            self._encode(part, part.of(flat), part.of_residual(residual), _at(at, "part", number))
            for number, part in enumerate(parts)
        )

    def _own(
        self,
        parts: Sequence[OwnedPart],
        sent: Sequence[Payload],
        like: Tensor,
        lost: Tensor | None,
        at: AggregationContext,
    ) -> Tensor:
        """What this worker sent, less what its part lost in the second encoding where it is not remembered."""
        whole = like.new_empty(sum(part.layout.numel for part in parts))
        for part, payload in zip(parts, sent, strict=True):
            self._decode(part, [payload], part.of(whole))
        if lost is not None:
            parts[at.rank].of(whole).sub_(lost, alpha=at.world)
        return whole

    def _encode_mean(
        self, part: OwnedPart, mean: Tensor, finite: bool, owed: Residual | None, at: AggregationContext
    ) -> Payload:
        """What travels for a part's mean, + owed.before. Only this worker knows whether the sum stayed within range: it
        tells all ranks by numbers that cannot be added up."""
        if finite:
            try:
                return self._encode(part, mean, owed, at)
            except NotFinite:
                pass  # what is owed may leave the range, too
        zeros = self._encode(part, torch.zeros_like(mean), None, at)
        return tuple(
            torch.full_like(each, torch.finfo(each.dtype).max) if each.is_floating_point() else each for each in zeros
        )

    def _encode(self, part: OwnedPart, span: Tensor, residual: Residual | None, at: AggregationContext) -> Payload:
        if not part.layout.numel:
            return part.filled(tuple(span.new_empty(0, dtype=dtype) for dtype in part.dtypes))
        return part.filled(self.inner.encode(FlatTensors(span, part.layout), at, residual))

    def _decode(self, part: OwnedPart, payloads: Sequence[Payload], out: Tensor, divisor: int = 1) -> None:
        if part.layout.numel:
            self.inner.decode([part.emptied(payload) for payload in payloads], part.layout, out, divisor)


@dataclass(frozen=True)
class OwnedPart:
    """The entries that one worker averages: pieces of tensors, under the names of these."""

    start: int  # the first of them
    layout: Layout
    shapes: tuple[torch.Size, ...] = ()  # of its message's tensors
    room: tuple[int, ...] = ()  # their numbers of elements in the largest part's message
    dtypes: tuple[torch.dtype, ...] = ()  # theirs

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.layout.numel]

    def of_residual(self, residual: Residual | None) -> Residual | None:
        return None if residual is None else Residual(self.of(residual.before), self.of(residual.after))

    def filled(self, payload: Payload) -> Payload:
        """As long as the largest part's."""
        return tuple(
            each.reshape(-1) if each.numel() == room else pad(each.reshape(-1), (0, room - each.numel()))
            for each, room in zip(payload, self.room, strict=True)
        )

    def emptied(self, payload: Payload) -> Payload:
        """Without what `filled` added. Raises MalformedError."""
        expect_tensors([payload], len(self.room))
        for each, room, dtype in zip(payload, self.room, self.dtypes, strict=True):
            expect(each, dtype, room)
        return tuple(each[: shape.numel()].view(shape) for each, shape in zip(payload, self.shapes, strict=True))


@lru_cache(maxsize=256)
def _parts(codec: Codec, same: Itself[Layout], world: int, dtype: torch.dtype) -> tuple[OwnedPart, ...]:
    """Where each worker's part lies, and what its messages look like. All parts but the last ones are equally large."""
    layout = same.item
    size = -(-layout.numel // world)
    parts = [
        _cut(layout, min(rank * size, layout.numel), min((rank + 1) * size, layout.numel)) for rank in range(world)
    ]
    known: dict[tuple[int, ...], Payload] = {}  # by the sizes of its pieces, which most parts have alike
    messages = [
        known.get(part.layout.sizes) or known.setdefault(part.layout.sizes, _message(codec, part.layout, world, dtype))
        for part in parts
        if part.layout.numel or part is parts[0]
    ]
    empty = [torch.Size([0])] * len(messages[0])
    shapes = [tuple(each.shape for each in message) for message in messages]
    shapes += [tuple(empty)] * (world - len(messages))
    room = tuple(max(shape.numel() for shape in same) for same in zip(*shapes, strict=True))
    dtypes = tuple(each.dtype for each in messages[0])
    return tuple(
        replace(part, shapes=shape, room=room, dtypes=dtypes) for part, shape in zip(parts, shapes, strict=True)
    )


def _message(codec: Codec, layout: Layout, world: int, dtype: torch.dtype) -> Payload:
    x = FlatTensors(torch.empty(layout.numel, dtype=dtype, device="meta"), layout)
    return codec.encode(x, AggregationContext(world=world))


def _cut(layout: Layout, start: int, stop: int) -> OwnedPart:
    """The pieces of tensors that lie between two places."""
    pieces = {slot.name: (min(slot.end, stop) - max(slot.offset, start),) for slot in layout}
    return OwnedPart(start, Layout.of({name: piece for name, piece in pieces.items() if piece[0] > 0}))


def _at(at: AggregationContext, stage: str, number: int) -> AggregationContext:
    """An address of its own for each part and stage: the pieces of one tensor share its name, and would share noise."""
    return replace(at, seed=rng.address(at.seed, stage, number))
