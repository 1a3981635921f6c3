"""Ownership: which part of an optimizer's work a compressor takes, and by which rule parameters then move."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch.optim import Optimizer


class UpdateRule(Enum):
    """How the optimizer's step is made where a compressor has a part in it; gossamer.train.moments has the rules."""

    VELOCITY = "velocity"  # SGD: what arrives has momentum in it
    STEP = "step"  # Adam: what arrives is its step, but for the learning rate
    # Adam: what arrives makes its first moment, and its second ...
    FROZEN_VARIANCE = "frozen variance"  # ... stands still
    ROW_VARIANCE = "row variance"  # ... stands still, and is its mean over each row
    MOMENTUM_VARIANCE = "momentum variance"  # ... is made of the first one's square
    AGREED_VARIANCE = "agreed variance"  # ... goes on where something arrived
    WINDOW = "window"  # Adam: both moments are those of the last few gradients that arrived
    SHARED_VARIANCE = "shared variance"  # Adam: steps divide by the second moment that all workers agreed on last
    SIGN = "sign"  # SGD or Adam: parameters move by the sign of what arrives


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """A compressor applies the momentum of one of these `optimizers` in its place, and parameters move by `rule`, once
    `start` exchanges were committed.

    window: how many gradients a rule remembers that remembers them.
    """

    optimizers: tuple[type[Optimizer], ...]
    rule: UpdateRule
    start: int = 0
    window: int = 0
