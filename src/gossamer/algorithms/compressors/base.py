"""Base classes of compressors: the mean of many tensors, computed by a script of collective operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from gossamer.algorithms.compressors.decoding import decode_in_range, decode_received
from gossamer.algorithms.compressors.ownership import Ownership
from gossamer.base.aggregation import FORM, Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import Residual, all_finite, scratch_for, scratch_like, widened
from gossamer.base.layout import FlatTensors, Layout, Slot, accumulation_dtype
from gossamer.base.ops import AllGather, Payload
from gossamer.base.term import Term
from gossamer.errors import MalformedError, NotFinite, OutOfRange

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)  # of the host, of a device


class Decoder(Protocol):
    """Decodes payloads of a known number of tensors."""

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        """Overwrite `out`: (n,) with the sum of the decoded payloads divided by `divisor`. Raises MalformedError."""

    def tensors(self, layout: Layout, dtype: torch.dtype) -> int:
        """Return the number of tensors in a payload for inputs of this layout and dtype."""


class Compressor(Term, ABC):
    """Base class of gradient compressors: computes the mean of a flat bucket of tensors over a group.

    A compressor is a generator. `aggregate` yields collective operations, such as AllReduceMean or AllGather, receives
    their results, and returns an AggregationResult. It does no communication itself, so the same code runs over every
    transport, in simulations, and on meta tensors to count bytes.

    Subclasses are frozen dataclasses; their fields are the hyperparameters. For an encoder and a decoder whose payloads
    are all-gathered, derive from Codec.

    Example:
        >>> gossamer.Int8(block=128)
        Int8(block=128)
    """

    kind = "compressor"

    @property
    def wants_feedback(self) -> bool:
        """Whether a recipe should wrap it in Feedback: true for biased compressors unless feedback=False."""
        return False

    @property
    def handles_every_shape(self) -> bool:
        """Whether it handles tensors of every shape, so that a recipe need not wrap it in Route."""
        return False

    @property
    def decodes_without_input(self) -> bool:
        """Whether the mean depends on the results of the operations alone, so that a receiver needs no input of its
        own.
        """
        return False

    @property
    def widens_residuals(self) -> bool:
        """Whether `aggregate_compensated` accepts residuals narrower than float32, also in its own state, and widens
        them part by part."""
        return False

    def decoders(self, layout: Layout) -> Sequence[tuple[Decoder, Layout]] | None:
        """Return the decoders of one worker's message for this layout, in the order of its tensors.

        Returns:
            (decoder, part of the layout) pairs, or None if only the complete script can decode the message.
        """
        return None

    @property
    def incremental(self) -> bool:
        """Whether a message is a change relative to all messages before it, and cannot be decoded without them."""
        return False

    @property
    def adapts(self) -> bool:
        """Whether the format of a message depends on earlier messages, so that a receiver that missed them cannot
        decode it.
        """
        return False

    def denser(self) -> Sequence[Compressor]:
        """Return variants with higher densities, from 1/4 downwards, that share this compressor's state.

        A warm-up passes through them. Empty for compressors without a density.
        """
        return ()

    def counts(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return the number of entries sent of tensors of these sizes; empty for compressors without a density."""
        return ()

    def with_counts(self, counts: tuple[int, ...]) -> Compressor | None:
        """Return a variant that sends these numbers of entries, one per tensor of a layout, and shares this
        compressor's state.

        None for compressors without a density.
        """
        return None

    @property
    def must_be_outermost(self) -> bool:
        """Whether only Route may wrap this compressor."""
        return False

    def completed(self, complete: Callable[[Compressor], Compressor]) -> Compressor:
        """Return the compressor that a recipe uses: `complete(self)`, or self with `complete` applied to inner
        compressors.
        """
        return complete(self)

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        """Return the initial state for tensors with the layout, dtype and device of `like`; equal on all ranks, except
        the state of a part that only this rank handles.
        """
        return State()

    def init_compensated(self, like: FlatTensors, at: AggregationContext) -> State:
        """Return the initial state for `aggregate_compensated`, if that differs from the one for `aggregate`."""
        return self.init(like, at)

    @abstractmethod
    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        """Compute the mean of `x` over the group.

        Args:
            x: this worker's input, x.flat: (n,).
            state: read only; the updated state is returned as `next_state`.
            at: step, rank, world size and seed.
            out: (n,) in x's dtype, receives the mean. It may be x.flat; `x`, and `own` if it aliases `x`, are then
                overwritten.

        Raises:
            NotFinite: x has a value that cannot be sent. Raised before the first operation and at no later point.
        """

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        """Compute the mean of x + residual.before; write the part that this worker did not send to residual.after."""
        wanted = torch.add(x.flat, residual.before, out=residual.after)
        into = out if out is not None and out.dtype == wanted.dtype else None
        staged = yield from self.aggregate(FlatTensors(wanted, x.layout), state, at, into)
        own = staged.own
        if own.data_ptr() == wanted.data_ptr():  # all of it was sent; `own` aliases residual.after
            own = wanted.clone()
        residual.after.sub_(own)
        return with_mean_in(replace(staged, own_contribution=lambda: own), out)

    def group(self, slot: Slot) -> int:
        """Return a sort key: tensors of equal group are placed next to each other in a bucket, groups in ascending
        order.
        """
        return 0

    def suits(self, shape: Sequence[int]) -> bool:
        """Whether compressing a tensor of this shape can save bytes."""
        return True

    def owns_momentum(self, slot: Slot) -> Ownership | None:
        """Return the optimizers that hand their momentum to this compressor for the tensor, or None."""
        return None


class GatheredCompressor(Compressor):
    """Base class of compressors that all-gather one encoded message per worker, which each rank decodes."""

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        return self._gathered(x, at, out, None)

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        return self._gathered(x, at, out, residual)

    @abstractmethod
    def _gathered(
        self, x: FlatTensors, at: AggregationContext, out: Tensor | None, residual: Residual | None
    ) -> Aggregation:
        """Encode x, plus residual.before if a residual is given, all-gather, and decode the mean."""


class Codec(GatheredCompressor):
    """Base class of compressors that are an encoder and a decoder: payloads are all-gathered, each rank decodes all.

    mean = 1/n sum over the ranks i of decode(encode(x_i))

    Subclasses implement `encode` and `decode`.

    Example:
        >>> x = gossamer.extend.FlatTensors.pack({"weight": torch.tensor([1.0, -2.0])})
        >>> at = gossamer.extend.AggregationContext()
        >>> [each.dtype for each in gossamer.Int8().encode(x, at)]
        [torch.float32, torch.int8]
    """

    @property
    def decodes_without_input(self) -> bool:
        return True

    @property
    def widens_residuals(self) -> bool:
        return True

    def decoders(self, layout: Layout) -> Sequence[tuple[Decoder, Layout]] | None:
        return [(self, layout)]

    def tensors(self, layout: Layout, dtype: torch.dtype) -> int:
        return len(
            self.encode(FlatTensors.zeros(layout, dtype=dtype, device=torch.device("meta")), AggregationContext(), None)
        )

    @property
    def reencodable(self) -> bool:
        """Whether encoding a mean again loses little, so that a recipe may wrap the codec in Sharded."""
        return False

    def of(self, rank: int) -> Codec:
        """Return the codec of a rank's messages; PerWorker has several."""
        return self

    def senders(self, world: int) -> Sequence[tuple[Codec, Sequence[int]]]:
        """Return the different codecs, each with its ranks in ascending order; equal on every rank."""
        return [(self, range(world))]

    @abstractmethod
    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        """Encode x.flat: (n,), or x.flat + residual.before if a residual is given.

        Args:
            x: the input; the payload shares no memory with it.
            at: step, rank, world size and seed.
            residual: its `after` receives the encoding error, in the same pass.

        Returns:
            A tuple of tensors. Their shapes depend on the layout only.

        Raises:
            NotFinite: the input has a value that cannot be sent.
        """

    @abstractmethod
    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        """Overwrite `out`: (n,) with the sum of the decoded payloads, added in the order given, divided by `divisor`.

        Args:
            payloads: one per rank, in the order of ranks.
            layout: that of the encoded tensors.
            out: (n,), receives the result.
            divisor: number of ranks for a mean, 1 for a sum.

        Raises:
            MalformedError: no encoder makes such a payload. Raised before `out` is written.
        """

    def decoded(self, payload: Payload, layout: Layout, like: Tensor) -> Tensor:
        """Decode one payload: (n,), at least float32, not finite where its numbers exceed the range of that dtype."""
        out = scratch_for(layout.numel, accumulation_dtype(like.dtype), like.device)
        decode_in_range(lambda payloads, into: self.decode(payloads, layout, into), [payload], out)
        return out

    def _gathered(
        self, x: FlatTensors, at: AggregationContext, out: Tensor | None, residual: Residual | None
    ) -> Aggregation:
        with widened(residual) as wide:
            payload = self.encode(x, at, wide)
        del wide
        received = yield AllGather(payload)
        mean = mean_buffer_like(x.flat, out)
        finite = decode_received(
            lambda payloads, into: self.decode(payloads, x.layout, into, at.world), received, x.layout, mean, at
        )
        like = x.flat.new_empty(0)
        own = partial(self.decoded, payload, x.layout, like)
        return with_mean_in(AggregationResult(mean=mean, own_contribution=own, finite=finite), out)


def with_mean_in(staged: AggregationResult, out: Tensor | None) -> AggregationResult:
    """Return the result with its mean copied to `out`, if given.

    The values may exceed the range of a narrower dtype.
    """
    if out is None or staged.mean is out:
        return staged
    out.copy_(staged.mean)
    return replace(staged, mean=out, finite=staged.finite and all_finite(out))


def mean_buffer_like(x: Tensor, out: Tensor | None) -> Tensor:
    """Return a buffer for the mean: `out` if its dtype is precise enough, otherwise scratch memory."""
    dtype = accumulation_dtype(x.dtype)
    return out if out is not None and out.dtype == dtype else scratch_like(x, dtype)


@contextmanager
def decoded_by(compressor: object) -> Iterator[None]:
    """Add the compressor to a MalformedError."""
    try:
        yield
    except OutOfRange:
        raise
    except MalformedError as error:
        raise MalformedError(f"{compressor!r} received a payload that it did not encode: {error}") from error


def relayed(script: Aggregation, answer: Any = None) -> Aggregation:
    """Continue a script with `answer`, as `yield from` runs one from its start.

    It keeps no references to operations and answers, which are as large as buckets.
    """
    asked, answers = [], [answer]
    del answer
    while True:
        try:
            asked.append(script.send(answers.pop()))
        except StopIteration as ended:
            return cast(AggregationResult, ended.value)
        answers.append((yield asked.pop()))


def aggregate_finite(
    compressor: Compressor,
    x: FlatTensors,
    state: State,
    at: AggregationContext,
    out: Tensor | None,
    lost: Callable[[], None],
    short: Callable[[BaseException], None] | None = None,
) -> Aggregation:
    """Aggregate x; if x has a value that cannot be sent, call `lost` and continue with zeros, written over x.

    The other ranks wait for this worker in both cases. All ranks must then skip the step.

    Args:
        compressor: the compressor to run.
        x: the input; zeroed if it cannot be sent.
        state: the compressor's state.
        at: step, rank, world size and seed.
        out: receives the mean.
        lost: called if x is not finite.
        short: called if memory runs out before the first operation; the script then continues with zeros as well.
            None: the error is raised.
    """
    with decoded_by(compressor):
        script = compressor.aggregate(x, state, at, out)
        try:
            asked = [next(script)]
        except StopIteration as ended:
            return cast(AggregationResult, ended.value)
        except NotFinite:
            lost()
        except OUT_OF_MEMORY as failure:
            if short is None:
                raise
            short(failure)
        else:
            return (yield from relayed(script, (yield asked.pop())))
    del script  # frees its buffers
    x.flat.zero_()
    # The residual may be the value that cannot be sent, and the state of this attempt is discarded. The payload must
    # still have the format that the other ranks expect.
    blank = compressor.init(x, at)
    blank.update({key: state[key] for key in blank if key.rpartition(".")[2] == FORM})
    with decoded_by(compressor):
        return (yield from compressor.aggregate(x, blank, at, out))
