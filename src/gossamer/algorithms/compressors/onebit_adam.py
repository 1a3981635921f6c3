"""1-bit Adam: Adam's momentum travels, once its variance is frozen."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.algorithms.compressors.adam_momentum import AdamMomentum
from gossamer.algorithms.compressors.base import Compressor
from gossamer.algorithms.compressors.onebit import OneBit
from gossamer.algorithms.compressors.ownership import UpdateRule
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class OneBitAdam(AdamMomentum):
    """Send gradients dense for `warmup` steps; then Adam's variance is frozen and its momentum travels by `inner`.

    m_i = b1 m + (1 - b1) g_i, m' = mean C(m_i), g = (m' - b1 m) / (1 - b1), with which Adam's own first moment is m'
    law:    the inner compressor's, for m_i; a recipe wraps it in Feedback where it is biased
    bytes:  2 (n-1)/n N itemsize for `warmup` steps, then the inner compressor's
    source: Tang et al. 2021, ICML

    For torch.optim.Adam and AdamW, with gossamer.attach. After the warm-up parameters move by lr m / (sqrt(v) + eps)
    with NO bias correction, neither of m nor of v: warm up for more than 1 / (1 - b2) steps, since before that v is
    still small and steps would be too long. Entries whose v is 0, such as rows of an embedding that no batch held, stay
    as they are. What travels begins at 0 after the warm-up: the moment of the warm-up is the same on all workers, so it
    stays in Adam's state, decays there by b1 a step, and m' is added to it. In the paper it travels along, so for about
    1 / (1 - b1) steps messages here are smaller; with an exact `inner` both are the same. Weight decay, AdamW's as
    Adam's, does not travel. Other rules for v: CompressedAdam.

    What comes out of backward() after the warm-up is g, mostly noise of the rounding that Adam averages away: clip here
    (each tensor's fresh gradient, to a norm of at most clip sqrt(n): see DGC) and not there.
    """

    warmup: int = 1000
    inner: Compressor = OneBit()
    clip: float | None = None

    def __post_init__(self) -> None:
        require(
            self.warmup >= 1,
            f"warmup counts the steps in which Adam's variance is found, at least 1, not {self.warmup}. "
            "Write OneBitAdam(warmup=1000), a fifth of the training or so.",
        )
        super().__post_init__()

    @property
    def rule(self) -> UpdateRule:
        return UpdateRule.FROZEN_VARIANCE
