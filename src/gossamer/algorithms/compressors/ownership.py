"""Ownership: the part of an optimizer's work that a compressor does, and the rule that then updates parameters."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch.optim import Optimizer


class UpdateRule(Enum):
    """The rule of the optimizer's step if a compressor does a part of it; implemented in gossamer.train.moments."""

    VELOCITY = "velocity"  # SGD: the mean includes momentum
    STEP = "step"  # Adam: the mean is the step, except for the learning rate
    # Adam: the mean determines the first moment, and the second ...
    FROZEN_VARIANCE = "frozen variance"  # ... is constant
    ROW_VARIANCE = "row variance"  # ... is constant, and is its mean over each row
    MOMENTUM_VARIANCE = "momentum variance"  # ... is computed from the square of the first
    AGREED_VARIANCE = "agreed variance"  # ... is updated for entries that arrived
    WINDOW = "window"  # Adam: both moments are those of the last few averaged gradients
    SHARED_VARIANCE = "shared variance"  # Adam: steps divide by the last second moment that all workers share
    SIGN = "sign"  # SGD or Adam: parameters move by the sign of the mean


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """A compressor that applies the momentum of one of `optimizers`; parameters move by `rule`.

    Args:
        optimizers: classes of optimizers that are supported.
        rule: the rule that updates the parameters.
        start: number of exchanges after which the rule applies.
        window: number of gradients that the rule WINDOW includes.
    """

    optimizers: tuple[type[Optimizer], ...]
    rule: UpdateRule
    start: int = 0
    window: int = 0
