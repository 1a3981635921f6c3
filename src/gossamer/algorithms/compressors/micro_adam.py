"""MicroAdam: Adam's moments are those of the last few sums that arrived."""

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
    """Send gradients by `inner`; Adam's moments forget what arrived more than `window` steps ago.

    m = (1 - b1) / (1 - b1^t) sum_(r < window) b1^r g_(t-r), v likewise, of g^2 and b2; p -= lr m / (sqrt(v) + eps)
    law:    the inner compressor's; a recipe wraps it in Feedback where it is biased
    bytes:  the inner compressor's; memory: (window + 2) N in the optimizer's state, in the place of Adam's 2 N
    source: Modoranu et al. 2024, NeurIPS

    For torch.optim.Adam and AdamW, with gossamer.attach. With inner=Dense() it is Adam for `window` steps. The paper
    saves memory, on one machine: it keeps the window's entries alone and quantizes feedback to 4 bits. Here bytes are
    what is saved: the window holds sums of all workers in full size, and feedback is at least float32.

    clip: of each tensor's fresh gradient, to a norm of at most clip sqrt(n): see DGC.
    """

    inner: Compressor = TopK(density=0.01)
    window: int = 10
    clip: float | None = None

    def __post_init__(self) -> None:
        require(
            self.window >= 1, f"window counts gradients, at least 1, not {self.window}. Write MicroAdam(window=10)."
        )
        super().__post_init__()

    def owns_momentum(self, slot: Slot) -> Ownership:
        return Ownership(optimizers=(Adam,), rule=UpdateRule.WINDOW, window=self.window)

    def init(self, like: FlatTensors, at: AggregationContext) -> State:
        return self.inner.init(like, at)

    def aggregate(self, x: FlatTensors, state: State, at: AggregationContext, out: Tensor | None = None) -> Aggregation:
        return self.inner.aggregate(FlatTensors(clipped(x, self.clip, at), x.layout), state, at, out)
