"""Sharded aggregation: each worker averages a part in a reduce-scatter, and an all-gather sends it encoded again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.algorithms.compressors.base import Codec, Compressor, mean_buffer_like, with_mean_in
from gossamer.algorithms.compressors.decoding import decode_mean, decode_received, expect_tensors
from gossamer.algorithms.compressors.feedback_rules import RESIDUAL, debtor
from gossamer.algorithms.compressors.per_worker import PerWorker, by_rank
from gossamer.algorithms.compressors.wrapper import Wrapper
from gossamer.base import rng
from gossamer.base.aggregation import Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import Residual, scratch_like, widened
from gossamer.base.kernels.reference.segments import expect
from gossamer.base.layout import FlatTensors, Itself, Layout, accumulation_dtype
from gossamer.base.ops import AllGather, AllToAll, Form, Payload, TensorForm
from gossamer.errors import NotFinite

UNSENT = "owed"


def is_group_residual(key: str) -> bool:
    """Whether a state key is that of a part's residual of the second encoding; wrappers prefix the keys."""
    return key.rpartition(".")[2] == UNSENT


def is_unsent(key: str) -> bool:
    """Whether a state key is that of a residual, of the first or the second encoding."""
    return key.rpartition(".")[2] in (RESIDUAL, UNSENT)


def settle(state: State, at: AggregationContext) -> None:
    """Move the residual of the second encoding into this worker's own state, so that no state depends on the partition.

    An entry of one worker counts 1/workers in the mean, so it is multiplied by the number of workers.
    """
    for key in filter(is_group_residual, state):
        place, sign = debtor(key.removesuffix(UNSENT), state)
        undelivered, whole = state[key].flat, state[place].flat
        start = min(at.rank * -(-len(whole) // at.world), len(whole))
        whole[start : start + len(undelivered)].add_(undelivered, alpha=sign * at.world)
        undelivered.zero_()


def redivide(
    state: State, compressor: Compressor, like: FlatTensors, before: AggregationContext, now: AggregationContext
) -> None:
    """Settle residuals of the second encoding, and begin empty ones for the parts of another rank or group size.

    Args:
        state: of one bucket; changed in place.
        compressor: of the state.
        like: the bucket's tensors.
        before: has the rank and the group size of the state.
        now: has the new ones.
    """
    keys = [*filter(is_group_residual, state)]
    if not keys:
        return
    settle(state, before)
    blank = compressor.init(FlatTensors(torch.empty_like(like.flat, device="meta"), like.layout), now)
    for key in keys:
        old = state[key].flat
        state[key] = FlatTensors.zeros(blank[key].layout, dtype=old.dtype, device=old.device)


@dataclass(frozen=True, repr=False)
class Sharded(Wrapper):
    """Compressed reduce-scatter and all-gather: worker j averages the j-th part and encodes the mean again.

    m_j = mean over workers of C(x)_j, answer_j = C(m_j + e_j), e'_j = m_j + e_j - answer_j
    law:    mean own = answer + e' - e; without Feedback around it e stays 0, and own has that error instead
    bytes:  2 (workers - 1) M, M the largest part's message: about 2/workers of the codec's alone
    source: Seide et al. 2014, Interspeech; Tang et al. 2021, ICML (error feedback in both places)

    Tang et al. call C(m + e) the server compression and e the server error. Parts have ceil(N / workers)
    entries; messages are padded to the size of the largest. The worker of a part keeps its server error: memory of
    2 N / workers numbers of at least float32, double-buffered. When workers join or leave, e moves into that worker's
    own residual, and the parts are divided again.

    Args:
        inner: the codec, such as Int8() or Float4(), or a PerWorker of such codecs.

    Example:
        >>> gossamer.Sharded(gossamer.Int8())
        Sharded(Int8())
    """

    inner: Codec | PerWorker

    @property
    def wants_feedback(self) -> bool:
        return self.inner.wants_feedback

    @property
    def widens_residuals(self) -> bool:
        return True

    def init_compensated(self, like: FlatTensors, at: AggregationContext) -> State:
        part = self._parts(like, at)[at.rank]
        return State(
            {UNSENT: FlatTensors.zeros(part.layout, dtype=accumulation_dtype(like.flat.dtype), device=like.flat.device)}
        )

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        return self._in_parts(x, None, None, at, out)

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        left = state.scratch(UNSENT)
        staged = yield from self._in_parts(x, residual, Residual(state[UNSENT].flat, left.flat), at, out)
        start = self._parts(x, at)[at.rank].start

        def share() -> Tensor:
            whole = left.flat.new_zeros(x.layout.numel, dtype=accumulation_dtype(left.flat.dtype))
            whole[start : start + len(left.flat)] = left.flat
            return whole

        return replace(staged, owes=share, next_state=State({UNSENT: left}))

    def _parts(self, x: FlatTensors, at: AggregationContext, rank: int | None = None) -> Sequence[OwnedPart]:
        """The parts of all workers, as `rank` (default: this worker) encodes them."""
        codec = self.inner.of(at.rank if rank is None else rank)
        return _parts(codec, Itself(x.layout), at.world, x.flat.dtype)

    def _in_parts(
        self,
        x: FlatTensors,
        residual: Residual | None,
        undelivered: Residual | None,
        at: AggregationContext,
        out: Tensor | None,
    ) -> Aggregation:
        parts = self._parts(x, at)
        own_part = parts[at.rank]
        senders = self.inner.senders(at.world)
        forms = None if len(senders) == 1 else _forms(self.inner, Itself(x.layout), at.world, x.flat.dtype)
        sent = self._encode_parts(parts, x.flat, residual, at)
        received = yield AllToAll(sent, forms)
        agreed = scratch_like(own_part.of(x.flat), accumulation_dtype(x.flat.dtype))
        decoders = [(self._parts(x, at, ranks[0])[at.rank].decode, ranks) for _, ranks in senders]
        finite = decode_mean(decoders, received, own_part.layout, agreed, at)
        encoded_mean = self._encode_mean(own_part, agreed, finite, undelivered, _at(at, "mean", at.rank))
        like, lost = agreed.new_empty(0), agreed if undelivered is None else None
        del received, agreed  # as large as the bucket together, and unused during the all-gather
        answers = yield AllGather(encoded_mean, forms)
        mean = mean_buffer_like(x.flat, out)
        finite = True
        owned = parts if forms is None else [self._parts(x, at, rank)[rank] for rank in range(at.world)]
        for rank, (part, payload) in enumerate(() if mean.is_meta else zip(owned, answers, strict=True)):
            into = part.of(mean)
            if not decode_received(part.decode, [payload], part.layout, into, at, (rank,)):
                into.fill_(inf)
                finite = False
        if lost is not None:
            lost.sub_(own_part.of(mean))
        own = partial(self._own, parts, sent, like, lost, at)
        return with_mean_in(AggregationResult(mean=mean, own_contribution=own, finite=finite), out)

    def _encode_parts(
        self, parts: Sequence[OwnedPart], flat: Tensor, residual: Residual | None, at: AggregationContext
    ) -> tuple[Payload, ...]:
        """Encode the part for each worker. To count bytes, one message represents all: their lengths are equal."""
        if flat.is_meta:
            first = parts[0]
            return (first.encode(first.of(flat), first.of_residual(residual), at),) * len(parts)
        return tuple(
            part.encode(part.of(flat), part.of_residual(residual), _at(at, "part", number))
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
        """Return the sent values, minus the second encoding's error of this worker's part if no residual keeps it."""
        whole = like.new_empty(sum(part.layout.numel for part in parts))
        for part, payload in zip(parts, sent, strict=True):
            part.decode([payload], part.of(whole))
        if lost is not None:
            parts[at.rank].of(whole).sub_(lost, alpha=at.world)
        return whole

    def _encode_mean(
        self, part: OwnedPart, mean: Tensor, finite: bool, undelivered: Residual | None, at: AggregationContext
    ) -> Payload:
        """Encode the mean of a part, plus `undelivered.before`. Only this worker knows whether the sum overflowed: it
        reports that to all ranks by values that cannot be summed.
        """
        if finite:
            try:
                return part.encode(mean, undelivered, at)
            except NotFinite:
                pass  # the residual may overflow, too
        zeros = part.encode(torch.zeros_like(mean), None, at)
        return tuple(
            torch.full_like(each, torch.finfo(each.dtype).max) if each.is_floating_point() else each for each in zeros
        )


@dataclass(frozen=True)
class OwnedPart:
    """The entries that one worker averages: pieces of tensors, with the names of the tensors, and their codec."""

    codec: Codec
    start: int  # offset of the first entry
    layout: Layout
    shapes: tuple[torch.Size, ...] = ()  # of its message's tensors
    room: tuple[int, ...] = ()  # elements of each tensor in the message of the largest part
    dtypes: tuple[torch.dtype, ...] = ()

    @property
    def form(self) -> Form:
        """The form of its message, equal for all parts of a codec."""
        return tuple(TensorForm((room,), dtype) for room, dtype in zip(self.room, self.dtypes, strict=True))

    def encode(self, span: Tensor, residual: Residual | None, at: AggregationContext) -> Payload:
        if not self.layout.numel:
            return self.filled(tuple(span.new_empty(0, dtype=dtype) for dtype in self.dtypes))
        with widened(residual) as wide:
            return self.filled(self.codec.encode(FlatTensors(span, self.layout), at, wide))

    def decode(self, payloads: Sequence[Payload], out: Tensor, divisor: int = 1) -> None:
        if self.layout.numel:
            self.codec.decode([self.emptied(payload) for payload in payloads], self.layout, out, divisor)

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.layout.numel]

    def of_residual(self, residual: Residual | None) -> Residual | None:
        if residual is None:
            return None
        return Residual(self.of(residual.before), self.of(residual.after), residual.factor)

    def filled(self, payload: Payload) -> Payload:
        """Pad a payload to the size of the largest part's."""
        return tuple(
            each.reshape(-1) if each.numel() == room else pad(each.reshape(-1), (0, room - each.numel()))
            for each, room in zip(payload, self.room, strict=True)
        )

    def emptied(self, payload: Payload) -> Payload:
        """Remove the padding of `filled`. Raises MalformedError."""
        expect_tensors([payload], len(self.room))
        for each, room, dtype in zip(payload, self.room, self.dtypes, strict=True):
            expect(each, dtype, room)
        return tuple(each[: shape.numel()].view(shape) for each, shape in zip(payload, self.shapes, strict=True))


@lru_cache(maxsize=256)
def _parts(codec: Codec, same: Itself[Layout], world: int, dtype: torch.dtype) -> tuple[OwnedPart, ...]:
    """Return each worker's part and the shapes of its message. All parts but the last ones have equal sizes."""
    layout = same.item
    size = -(-layout.numel // world)
    parts = [
        _cut(codec, layout, min(rank * size, layout.numel), min((rank + 1) * size, layout.numel))
        for rank in range(world)
    ]
    known: dict[tuple[int, ...], Payload] = {}  # by the sizes of the pieces, which are equal for most parts
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


@lru_cache(maxsize=256)
def _forms(inner: Codec | PerWorker, layout: Itself[Layout], world: int, dtype: torch.dtype) -> tuple[Form, ...]:
    """The form of each rank's messages."""
    return by_rank(inner.senders(world), lambda codec: _parts(codec, layout, world, dtype)[0].form)


def _message(codec: Codec, layout: Layout, world: int, dtype: torch.dtype) -> Payload:
    x = FlatTensors(torch.empty(layout.numel, dtype=dtype, device="meta"), layout)
    return codec.encode(x, AggregationContext(world=world))


def _cut(codec: Codec, layout: Layout, start: int, stop: int) -> OwnedPart:
    """Return the pieces of tensors between two offsets."""
    pieces = {slot.name: (min(slot.end, stop) - max(slot.offset, start),) for slot in layout}
    return OwnedPart(codec, start, Layout.of({name: piece for name, piece in pieces.items() if piece[0] > 0}))


def _at(at: AggregationContext, stage: str, number: int) -> AggregationContext:
    """Return a context with a separate seed for each part and stage: pieces of one tensor share its name."""
    return replace(at, seed=rng.address(at.seed, stage, number))
