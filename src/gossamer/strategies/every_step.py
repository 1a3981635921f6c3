"""Talk after every backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from gossamer.strategies.base import Strategy


@dataclass(frozen=True, repr=False)
class EveryStep(Strategy):
    """Average gradients in every backward pass; when backward() returns they are averaged.

    g = mean over workers of g_i
    source: Goyal et al. 2017, arXiv:1706.02677 (large minibatches); Li et al. 2020, VLDB (overlap)
    """
