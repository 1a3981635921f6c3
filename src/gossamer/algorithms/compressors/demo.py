"""Decoupled momentum: every worker keeps what it has not sent of its own momentum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim import SGD, Adam

from gossamer.algorithms.compressors.base import Compressor
from gossamer.algorithms.compressors.dgc import clipped
from gossamer.algorithms.compressors.error_feedback import RESIDUAL, Feedback
from gossamer.algorithms.compressors.momentum_wrapper import MomentumWrapper
from gossamer.algorithms.compressors.ownership import Ownership, UpdateRule
from gossamer.algorithms.compressors.rotated import Rotated
from gossamer.algorithms.compressors.route import Route
from gossamer.algorithms.compressors.topk import TopK
from gossamer.base.aggregation import Aggregation, AggregationContext, State
from gossamer.base.kernels import Residual
from gossamer.base.layout import FlatTensors, Slot, accumulation_dtype
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class DeMo(MomentumWrapper):
    """Add gradients up in a momentum of one's own, send its largest coefficients, and move by the sign of the mean.

    m_i = decay m_i + g_i, q_i = inner(m_i), m_i' = m_i - q_i, Q = mean q_i; p' = p - lr (weight_decay p + sign Q)
    law:    sum of what was sent + mean m = sum of what was given - sum of what decayed, (1 - decay) m at each step
    bytes:  the inner compressor's; memory: 2 N of at least float32, which take turns
    source: Peng et al. 2026, ICLR

    What is sent leaves the momentum, so that this is Feedback whose residual fades: what an entry waits for longer than
    1 / (1 - decay) steps is mostly forgotten, and where everything is sent nothing has momentum. decay=1 is Feedback.

    sign: with gossamer.attach, for torch.optim.SGD without momentum, Adam and AdamW, whose lr and weight decay are
    followed and which remember nothing then; for a learning rate such as Adam's. A recipe sends tensors of one
    dimension dense, but they move by signs, too. sign=False leaves Q to the optimizer as it is, and the others to
    Route; with LocalSGD and DiLoCo what waits then fades from round to round. One worker alone trains plainly, without
    signs.

    The authors' program divides a coefficient's sum by how many workers sent it, and not by all of them, takes 32 of
    each 64 by 64 block, and adds lr g up, which is the same until lr changes. clip: as in DGC.
    """

    inner: Compressor = Rotated(TopK(density=0.01))
    decay: float = 0.999
    sign: bool = True
    clip: float | None = None

    def __post_init__(self) -> None:
        require(
            0 <= self.decay <= 1,
            f"decay is the share of what waits that is left after a step, in [0, 1], not {self.decay}. "
            "Write DeMo(decay=0.999).",
        )
        require(
            not any(isinstance(term, Feedback) for term in self.inner.held()),
            f"{self.inner!r} remembers what it has not sent, and DeMo's momentum is just that: it would be sent twice. "
            "Write DeMo(Rotated(TopK(density=0.01))).",
        )
        super().__post_init__()

    @property
    def handles_every_shape(self) -> bool:
        """Route outside would leave tensors of one dimension to the optimizer, whose steps have another size."""
        return self.sign and self.inner.handles_every_shape

    @property
    def decodes_without_input(self) -> bool:
        return self.inner.decodes_without_input

    def completed(self, complete: Callable[[Compressor], Compressor]) -> Compressor:
        if not self.sign or self.inner.handles_every_shape:
            return self
        return replace(self, inner=Route(self.inner))

    def owns_momentum(self, slot: Slot) -> Ownership | None:
        return Ownership(optimizers=(SGD, Adam), rule=UpdateRule.SIGN) if self.sign else None

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        zeros = torch.zeros_like(like.flat, dtype=accumulation_dtype(like.flat.dtype))
        return State({RESIDUAL: FlatTensors(zeros, like.layout), **self.inner.init_compensated(like, at)})

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        left = state.scratch(RESIDUAL)
        torch.mul(state[RESIDUAL].flat, self.decay, out=left.flat)
        fresh = FlatTensors(clipped(x, self.clip, at), x.layout)
        staged = yield from self.inner.aggregate_compensated(
            fresh, Residual(left.flat, left.flat), state.part("", RESIDUAL), at, out
        )
        return replace(staged, next_state=State({RESIDUAL: left, **staged.next_state}))
