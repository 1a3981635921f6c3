"""MicroAdam: Adam's moments are computed from the last few averaged gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.optim import Adam

from gossamer.algorithms.compressors.base import Compressor
from gossamer.algorithms.compressors.dgc import clipped
from gossamer.algorithms.compressors.momentum_wrapper import MomentumWrapper
from gossamer.algorithms.compressors.ownership import Ownership, UpdateRule
from gossamer.algorithms.compressors.topk import TopK
from gossamer.base.aggregation import Aggregation, AggregationContext, State
from gossamer.base.layout import FlatTensors, Slot
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class MicroAdam(MomentumWrapper):
    """Send gradients by `inner`, and compute Adam's moments from the last `window` averaged gradients only.

    m = (1 - b1) / (1 - b1^t) sum_(r < window) b1^r g_(t-r), v the same of g^2 and b2; p -= lr m / (sqrt(v) + eps)
    law:    the inner compressor's; a recipe wraps it in Feedback if it is biased
    bytes:  the inner compressor's; memory: (window + 2) N in the optimizer's state, instead of Adam's 2 N
    source: Modoranu et al. 2024, NeurIPS

    For torch.optim.Adam and AdamW, with gossamer.attach. With inner=Dense() it equals Adam for `window` steps. The
    paper (`window` is m there) saves memory on one machine: it stores only the selected entries of the window and
    quantizes the error feedback to 4 bits. This version saves bytes: the window holds dense averaged gradients, and the
    residual is at least float32.

    Args:
        inner: compressor of the gradients.
        window: number of averaged gradients that the moments include.
        clip: norm limit of each tensor's gradient, clip sqrt(n) per worker; see DGC. None: no clipping.

    Example:
        >>> gossamer.MicroAdam(gossamer.TopK(density=0.01), window=20)
        MicroAdam(window=20)
    """

    inner: Compressor = TopK(density=0.01)
    window: int = 10
    clip: float | None = None

    def __post_init__(self) -> None:
        require(
            self.window >= 1,
            f"window must be a number of gradients, 1 or more, got {self.window}. Write MicroAdam(window=10).",
        )
        super().__post_init__()

    def owns_momentum(self, slot: Slot) -> Ownership:
        return Ownership(optimizers=(Adam,), rule=UpdateRule.WINDOW, window=self.window)

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        return self.inner.init(like, at)

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        return self.inner.aggregate(FlatTensors(clipped(x, self.clip, at), x.layout), state, at, out)
