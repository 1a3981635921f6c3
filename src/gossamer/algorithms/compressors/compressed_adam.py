"""Compressed Adam: sends Adam's momentum, compressed; the variance follows a selectable rule."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.algorithms.compressors.adam_momentum import AdamMomentum
from gossamer.algorithms.compressors.base import Compressor
from gossamer.algorithms.compressors.ownership import UpdateRule
from gossamer.algorithms.compressors.topk import TopK
from gossamer.errors import require

FROZEN, ROWS, MOMENTUM, AGREED = "frozen", "rows", "momentum", "agreed"
VARIANCES = {
    FROZEN: UpdateRule.FROZEN_VARIANCE,
    ROWS: UpdateRule.ROW_VARIANCE,
    MOMENTUM: UpdateRule.MOMENTUM_VARIANCE,
    AGREED: UpdateRule.AGREED_VARIANCE,
}
FOUND_EARLY = FROZEN, ROWS  # estimated during the warm-up


@dataclass(frozen=True, repr=False)
class CompressedAdam(AdamMomentum):
    """Send gradients uncompressed for `warmup` steps, then Adam's momentum by `inner`, with a selectable variance.

    m_i = b1 m + (1 - b1) g_i, m' = mean C(m_i), g = (m' - b1 m) / (1 - b1), with which Adam's own first moment is m'
    law:    the inner compressor's, for m_i; a recipe wraps it in Feedback if it is biased
    bytes:  2 (n-1)/n N itemsize for `warmup` steps, then the inner compressor's
    source: Tang et al. 2021, ICML (frozen); Zhang et al. 2025, EMNLP (momentum); Zhang et al. 2024, arXiv 2406.16793
            (one variance for many entries); Zheng et al. 2026, arXiv 2607.01678 (the two moments from one sparse sum)

    For torch.optim.Adam and AdamW, with gossamer.attach. The variance is never sent. Rules:

    "momentum"  AdamS: v' = b2 m^2 + (1 - b2) g^2, p -= lr m' / (sqrt(v') + eps). With inner=Dense() it is AdamS.
    "agreed"    Adam: v' = b2 v + (1 - b2) g^2 where g is not 0, unchanged elsewhere; with bias correction. With
                inner=Dense() it is Adam.
    "frozen"    v is constant after `warmup` steps, 1 or more: see OneBitAdam.
    "rows"      as "frozen", with the mean of v over each row of a matrix (its first dimension) for all its entries.

    As in OneBitAdam, the compressed momentum starts at 0 after a warm-up, and backward() then leaves g in .grad: clip
    with `clip`, not there.

    Args:
        inner: compressor of the momentum.
        variance: "momentum", "agreed", "frozen" or "rows".
        warmup: steps without compression; 1 or more for "frozen" and "rows".
        clip: norm limit of each tensor's gradient, clip sqrt(n) per worker; see DGC. None: no clipping.

    Example:
        >>> gossamer.CompressedAdam(gossamer.TopK(density=0.01), variance="frozen", warmup=1000)
        CompressedAdam(variance='frozen', warmup=1000)
    """

    inner: Compressor = TopK(density=0.01)
    variance: str = MOMENTUM
    warmup: int = 0
    clip: float | None = None

    def __post_init__(self) -> None:
        require(
            self.variance in VARIANCES,
            f"variance must be {', '.join(map(repr, VARIANCES))}, got {self.variance!r}. "
            f'Write CompressedAdam(variance="{MOMENTUM}").',
        )
        require(
            self.warmup >= 0,
            f"warmup must be a number of steps, 0 or more, got {self.warmup}. Write CompressedAdam(warmup=1000).",
        )
        require(
            self.warmup >= 1 or self.variance not in FOUND_EARLY,
            f'variance="{self.variance}" keeps the variance of the warm-up, and warmup is 0. Write '
            f'CompressedAdam(variance="{self.variance}", warmup=1000), or variance="{MOMENTUM}", which needs none.',
        )
        super().__post_init__()

    @property
    def rule(self) -> UpdateRule:
        return VARIANCES[self.variance]
