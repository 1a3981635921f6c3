"""What a compressor is: a rule for what travels, written as a conversation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.kernels import all_finite
from gossamer.layout import Layout, Packed, Slot
from gossamer.terms import Term
from gossamer.words import Aggregation, At, Gather, Payload, Staged, State


class Compressor(Term, ABC):
    """What travels when a group agrees on the mean of many tensors that lie side by side."""

    kind = "compressor"

    @property
    def wants_feedback(self) -> bool:
        """Whether a recipe should wrap this in Feedback: the rule is biased and nobody said otherwise."""
        return False

    def init(self, like: Packed, at: At) -> State:
        """State for tensors laid out, typed and placed as `like`; equal on every rank at first."""
        return {}

    @abstractmethod
    def aggregate(self, x: Packed, state: State, at: At, out: Tensor | None = None) -> Aggregation:
        """Agree on the mean of `x` over the group. x.flat: (n,).

        `state` is read, never written: what it becomes is returned as `next_state`. The mean is written to `out` where
        given: (n,) in x's dtype; it may be x.flat itself, and then `x` (and an `own` that is `x`) is gone.
        """

    def group(self, slot: Slot) -> int:
        """Tensors of equal group want to lie side by side in a bucket, groups in ascending order."""
        return 0

    def suits(self, shape: Sequence[int]) -> bool:
        """Whether compressing a tensor of this shape could save anything."""
        return True


class Codec(Compressor):
    """A compressor that is no more than an encoder and a decoder: everyone hears everyone's payload."""

    @abstractmethod
    def encode(self, x: Packed, at: At) -> Payload:
        """What travels for x.flat: (n,). Shapes depend on the layout only, and the payload shares no memory with x."""

    @abstractmethod
    def accumulate(self, payloads: Sequence[Payload], layout: Layout, out: Tensor) -> None:
        """Add what each payload stands for to `out`: (n,), in the order given."""

    def decode(self, payload: Payload, layout: Layout, like: Tensor) -> Tensor:
        """What one payload stands for: (n,), at least in float32."""
        out = torch.zeros(layout.numel, dtype=wide(like.dtype), device=like.device)
        self.accumulate([payload], layout, out)
        return out

    def aggregate(self, x: Packed, state: State, at: At, out: Tensor | None = None) -> Aggregation:
        payload = self.encode(x, at)
        heard = yield Gather(payload)
        own = self.decode(payload, x.layout, x.flat)
        mean = out.zero_() if out is not None and out.dtype == own.dtype else torch.zeros_like(own)
        self.accumulate(heard, x.layout, mean)
        mean.div_(at.world)
        told = mean if out is None or mean is out else out.copy_(mean)
        return Staged(mean=told, own=own, finite=all_finite(told))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums and residuals of such numbers are kept: at least float32."""
    return torch.promote_types(dtype, torch.float32)
