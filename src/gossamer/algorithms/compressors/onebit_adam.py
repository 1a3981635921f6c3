"""1-bit Adam: sends Adam's momentum, compressed, after its variance is frozen."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.algorithms.compressors.adam_momentum import AdamMomentum
from gossamer.algorithms.compressors.base import Compressor
from gossamer.algorithms.compressors.onebit import OneBit
from gossamer.algorithms.compressors.ownership import UpdateRule
from gossamer.errors import require


@dataclass(frozen=True, repr=False)
class OneBitAdam(AdamMomentum):
    """1-bit Adam: uncompressed gradients for `warmup` steps, then Adam's momentum by `inner`, with a frozen variance.

    m_i = b1 m + (1 - b1) g_i, m' = mean C(m_i), g = (m' - b1 m) / (1 - b1), with which Adam's own first moment is m'
    law:    the inner compressor's, for m_i; a recipe wraps it in Feedback if it is biased
    bytes:  2 (n-1)/n N itemsize for `warmup` steps, then the inner compressor's
    source: Tang et al. 2021, ICML

    For torch.optim.Adam and AdamW, with gossamer.attach. The paper calls `warmup` T_w and the frozen variance v_{T_w}.
    After the warm-up, parameters move by lr m / (sqrt(v) + eps) WITHOUT bias correction of m or v. Warm up for more
    than 1 / (1 - b2) steps: before that v is small, and steps would be too large. Entries with v = 0, such as rows of
    an embedding that no batch contained, do not move.

    The compressed momentum starts at 0 after the warm-up. The moment of the warm-up is equal on all workers, so it
    remains in Adam's state, decays there by b1 a step, and m' is added to it. The paper sends it as well, so for about
    1 / (1 - b1) steps messages here have smaller values; with an exact `inner` both are equal. Weight decay, of AdamW
    or Adam, is not sent. For other rules for v see CompressedAdam.

    After the warm-up, backward() leaves g in .grad, which is mostly the rounding noise that Adam averages out. Clip
    with `clip`, not there.

    Args:
        warmup: steps without compression, 1 or more.
        inner: compressor of the momentum.
        clip: norm limit of each tensor's gradient, clip sqrt(n) per worker; see DGC. None: no clipping.

    Example:
        >>> gossamer.OneBitAdam(warmup=500)
        OneBitAdam(warmup=500)
    """

    warmup: int = 1000
    inner: Compressor = OneBit()
    clip: float | None = None

    def __post_init__(self) -> None:
        require(
            self.warmup >= 1,
            f"warmup must be the steps in which Adam's variance is estimated, 1 or more, got {self.warmup}. "
            "Write OneBitAdam(warmup=1000), about a fifth of the training.",
        )
        super().__post_init__()

    @property
    def rule(self) -> UpdateRule:
        return UpdateRule.FROZEN_VARIANCE
