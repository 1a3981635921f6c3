"""A linear map that tests of studies learn."""

from __future__ import annotations

import torch
from torch import Tensor

Pairs = tuple[Tensor, Tensor]


def samples() -> tuple[Pairs, Pairs, Pairs]:
    """To learn from, to look at meanwhile, and held out."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(96, 12, generator=draw, dtype=torch.float64)
    y = x @ torch.randn(12, 24, generator=draw, dtype=torch.float64)
    return (x[:64], y[:64]), (x[:64], y[:64]), (x[64:], y[64:])
