"""Range checks: whether numbers can be sent and added up."""

from __future__ import annotations

import torch
from torch import Tensor


def within_range(x: Tensor, terms: int) -> bool:
    """Whether x holds no NaN and nothing so large that a sum of `terms` such numbers could leave its dtype's range."""
    if x.is_meta or not x.numel():
        return True
    low, high = torch.aminmax(x)
    limit = torch.finfo(x.dtype).max / terms
    return bool(-limit <= low) and bool(high <= limit)  # both are False for NaN


def all_finite(x: Tensor) -> bool:
    """Whether x holds no NaN and no infinity; True on meta tensors.

    A sum takes one pass and is finite only if every number is (NaN and infinity survive any sum). Only a sum that is
    not (it may merely have overflowed) makes the exact test necessary, which costs ten times as much.
    """
    if x.is_meta:
        return True
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())
