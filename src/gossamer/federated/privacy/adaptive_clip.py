"""Adaptive clip: moves the clip norm to a quantile of the norms that devices have, by noisy counts of them."""

from __future__ import annotations

from math import exp


def next_clip(clip: float, share_below: float, quantile: float, rate: float) -> float:
    """S exp(-rate (share - quantile)). share_below: of the norms that were at most S, with noise, so perhaps none.

    source: Andrew et al. 2021, NeurIPS
    """
    return clip * exp(-rate * (min(max(share_below, 0.0), 1.0) - quantile))
