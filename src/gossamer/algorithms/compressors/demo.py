"""Decoupled momentum (DeMo): each worker sends the largest coefficients of its local momentum."""

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
    """Decoupled momentum: accumulate gradients locally, send the largest coefficients, move by the sign of their mean.

    m_i = decay m_i + g_i, q_i = inner(m_i), m_i' = m_i - q_i, Q = mean q_i; p' = p - lr (weight_decay p + sign Q)
    law:    sum of mean q + mean m = sum of mean g - sum of (1 - decay) mean m at each step, sums over the steps
    bytes:  the inner compressor's; memory: 2 N of at least float32, double-buffered
    source: Peng et al. 2026, ICLR

    The paper calls m the momentum Delta_t, decay beta, and q the fast components. The sent part is removed from the
    momentum, so DeMo is Feedback with a decaying residual: a part that is not sent within 1 / (1 - decay) steps is
    mostly lost, and if everything is sent there is no momentum. decay=1 is Feedback.

    With sign=True, use gossamer.attach and torch.optim.SGD without momentum, Adam or AdamW. Their learning rate and
    weight decay apply; they keep no moments then. Choose a learning rate as for Adam. A recipe sends tensors of one
    dimension uncompressed, but they move by signs, too. With sign=False the optimizer receives Q, and Route handles the
    other tensors; with LocalSGD and DiLoCo the residual then decays from round to round. A single worker trains without
    signs.

    The authors' program divides a coefficient's sum by the number of workers that sent it, instead of by all, selects
    32 of each 64 by 64 block, and accumulates lr g, which is equivalent while lr is constant.

    Args:
        inner: compressor of the momentum.
        decay: factor of the momentum per step, in [0, 1].
        sign: whether parameters move by the sign of the mean.
        clip: norm limit of each tensor's gradient, clip sqrt(n) per worker; see DGC. None: no clipping.

    Example:
        >>> gossamer.DeMo(decay=0.99)
        DeMo(decay=0.99)
    """

    inner: Compressor = Rotated(TopK(density=0.01))
    decay: float = 0.999
    sign: bool = True
    clip: float | None = None

    def __post_init__(self) -> None:
        require(
            0 <= self.decay <= 1,
            f"decay must be the factor of the momentum per step, in [0, 1], got {self.decay}. Write DeMo(decay=0.999).",
        )
        require(
            not any(isinstance(term, Feedback) for term in self.inner.held()),
            f"{self.inner!r} keeps a residual, and DeMo's momentum is one as well: errors would be sent twice. "
            "Write DeMo(Rotated(TopK(density=0.01))).",
        )
        super().__post_init__()

    @property
    def handles_every_shape(self) -> bool:
        """Whether Route is unnecessary; with signs, Route would leave tensors of one dimension to the optimizer's own
        step size.
        """
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
