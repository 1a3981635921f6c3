"""Base of compressors: the mean of many tensors as a script of collective operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from gossamer.algorithms.compressors.decoding import decode_heard, decoded_by
from gossamer.algorithms.compressors.ownership import Ownership
from gossamer.base.aggregation import FORM, Aggregation, AggregationContext, AggregationResult, State
from gossamer.base.kernels import Residual, all_finite, scratch_for, scratch_like
from gossamer.base.layout import FlatTensors, Layout, Slot, accumulation_dtype
from gossamer.base.ops import AllGather, Payload
from gossamer.base.term import Term
from gossamer.errors import NotFinite

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)  # of the host, of a device


class Decoder(Protocol):
    """Decodes payloads, and knows how many tensors one has."""

    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        """Overwrite `out`: (n,) with the sum of what the payloads stand for over `divisor`. Raises MalformedError."""

    def tensors(self, layout: Layout, dtype: torch.dtype) -> int:
        """How many tensors a payload of such numbers has."""


class Compressor(Term, ABC):
    """A rule for what travels when a group agrees on the mean of many tensors that lie side by side."""

    kind = "compressor"

    @property
    def wants_feedback(self) -> bool:
        """Whether a recipe should wrap this in Feedback: the rule is biased, and the recipe does not ask for that."""
        return False

    @property
    def handles_every_shape(self) -> bool:
        """Whether it has a way for tensors of every shape, so that a recipe need not put Route around it."""
        return False

    @property
    def decodes_without_input(self) -> bool:
        """Whether the mean follows from the answers alone, so that a reader needs no input of its own."""
        return False

    def decoders(self, layout: Layout) -> Sequence[tuple[Decoder, Layout]] | None:
        """The decoders of one worker's message over such a layout, part by part in the order of its tensors; None where
        only the whole script can decode it."""
        return None

    @property
    def incremental(self) -> bool:
        """Whether a message is a change to those before it, so that it means nothing to who has not heard them all."""
        return False

    @property
    def adapts(self) -> bool:
        """Whether the form of a message follows from those before it, so that who has not heard them all cannot tell
        what it is."""
        return False

    def denser(self) -> Sequence[Compressor]:
        """The same with more entries, from a quarter of all downwards: what a warm-up may pass through, since they
        remember the same. Empty where it has no number of entries to choose."""
        return ()

    def counts(self, sizes: Sequence[int]) -> Sequence[int]:
        """How many entries travel of tensors of these sizes; none where it has no number of entries to choose."""
        return ()

    def with_counts(self, counts: tuple[int, ...]) -> Compressor | None:
        """The same with so many entries of each tensor of a layout, in its order, which remembers the same; None where
        it has no number of entries to choose."""
        return None

    @property
    def must_be_outermost(self) -> bool:
        """Whether no compressor but Route may stand around it."""
        return False

    def completed(self, complete: Callable[[Compressor], Compressor]) -> Compressor:
        """What a recipe makes of it: `complete` of it, or itself around the completed ones that it holds."""
        return complete(self)

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        """State for tensors laid out, typed and placed as `like`; equal on every rank at first."""
        return State()

    def init_compensated(self, like: FlatTensors, at: AggregationContext) -> State:
        """State for `aggregate_compensated`, where it needs another than `aggregate`."""
        return self.init(like, at)

    @abstractmethod
    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        """Agree on the mean of `x` over the group. x.flat: (n,).

        `state` is read, never written: what it becomes is returned as `next_state`. The mean is written to `out` where
        given: (n,) in x's dtype; it may be x.flat itself, and then `x` (and an `own` that is `x`) is gone. Raises
        NotFinite, before the first operation and at no other time, where x holds a number that cannot be sent.
        """

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        """Agree on the mean of x + residual.before; write to residual.after what of it this worker did not send."""
        wanted = torch.add(x.flat, residual.before, out=residual.after)
        into = out if out is not None and out.dtype == wanted.dtype else None
        staged = yield from self.aggregate(FlatTensors(wanted, x.layout), state, at, into)
        own = staged.own
        if own.data_ptr() == wanted.data_ptr():  # all of it was sent, and it lies where what is left belongs
            own = wanted.clone()
        residual.after.sub_(own)
        return with_mean_in(replace(staged, own_contribution=lambda: own), out)

    def group(self, slot: Slot) -> int:
        """Tensors of equal group want to lie side by side in a bucket, groups in ascending order."""
        return 0

    def suits(self, shape: Sequence[int]) -> bool:
        """Whether compressing a tensor of this shape could save anything."""
        return True

    def owns_momentum(self, slot: Slot) -> Ownership | None:
        """The optimizer whose momentum this tensor gets here; None leaves it to the optimizer, after averaging."""
        return None


class Codec(Compressor):
    """A compressor that is no more than an encoder and a decoder: payloads are all-gathered."""

    @property
    def decodes_without_input(self) -> bool:
        return True

    def decoders(self, layout: Layout) -> Sequence[tuple[Decoder, Layout]] | None:
        return [(self, layout)]

    def tensors(self, layout: Layout, dtype: torch.dtype) -> int:
        return len(
            self.encode(FlatTensors.zeros(layout, dtype=dtype, device=torch.device("meta")), AggregationContext(), None)
        )

    @property
    def reencodable(self) -> bool:
        """Whether a mean, encoded once more, is as good as new: a recipe may then have every worker average a part."""
        return False

    @abstractmethod
    def encode(self, x: FlatTensors, at: AggregationContext, residual: Residual | None = None) -> Payload:
        """What travels for x.flat, or for x.flat + residual.before where given: (n,).

        What of the latter does not travel is written to residual.after, in the same pass. Shapes depend on the layout
        only, and the payload shares no memory with x. Raises NotFinite.
        """

    @abstractmethod
    def decode(self, payloads: Sequence[Payload], layout: Layout, out: Tensor, divisor: int = 1) -> None:
        """Overwrite `out`: (n,) with the sum of what the payloads stand for, in the order given, over `divisor`.

        Raises MalformedError, before it writes, for a payload that no encoder made.
        """

    def decoded(self, payload: Payload, layout: Layout, like: Tensor) -> Tensor:
        """What one payload stands for: (n,), at least in float32."""
        out = scratch_for(layout.numel, accumulation_dtype(like.dtype), like.device)
        self.decode([payload], layout, out)
        return out

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        return self._gathered(x, at, out, None)

    def aggregate_compensated(
        self, x: FlatTensors, residual: Residual, state: State, at: AggregationContext, out: Tensor | None = None
    ) -> Aggregation:
        return self._gathered(x, at, out, residual)

    def _gathered(
        self, x: FlatTensors, at: AggregationContext, out: Tensor | None, residual: Residual | None
    ) -> Aggregation:
        payload = self.encode(x, at, residual)
        heard = yield AllGather(payload)
        mean = mean_buffer_like(x.flat, out)
        finite = decode_heard(
            lambda payloads, into: self.decode(payloads, x.layout, into, at.world), heard, x.layout, mean, at
        )
        like = x.flat.new_empty(0)
        own = partial(self.decoded, payload, x.layout, like)
        return with_mean_in(AggregationResult(mean=mean, own_contribution=own, finite=finite), out)


def with_mean_in(staged: AggregationResult, out: Tensor | None) -> AggregationResult:
    """The same with its mean in `out`, where one is given: numbers may leave a narrower dtype's range."""
    if out is None or staged.mean is out:
        return staged
    out.copy_(staged.mean)
    return replace(staged, mean=out, finite=staged.finite and all_finite(out))


def mean_buffer_like(x: Tensor, out: Tensor | None) -> Tensor:
    """Where a mean of such numbers is computed: `out` where that is precise enough."""
    dtype = accumulation_dtype(x.dtype)
    return out if out is not None and out.dtype == dtype else scratch_like(x, dtype)


def relayed(script: Aggregation, answer: Any = None) -> Aggregation:
    """Go on with a script from `answer`, as `yield from` does from its beginning.

    Neither operations nor answers are kept alive here: they are as large as buckets.
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
    """Aggregate x; where it holds a number that cannot be sent, call `lost` and go on with zeros, written over x.

    The others wait for this worker either way. The step must then be skipped everywhere. short: is called where memory
    runs out before the first operation, and the same follows; None: that error is raised.
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
    del script  # and what it had allocated
    x.flat.zero_()
    # What is still owed may be what cannot be sent; nothing of this attempt will be remembered. What it looks like to
    # the others must be what they look for.
    blank = compressor.init(x, at)
    blank.update({key: state[key] for key in blank if key.rpartition(".")[2] == FORM})
    with decoded_by(compressor):
        return (yield from compressor.aggregate(x, blank, at, out))
