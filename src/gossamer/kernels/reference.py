"""The inner loops in plain torch: the truth that faster ones must equal."""

from __future__ import annotations

import torch
from torch import Tensor


def all_finite(x: Tensor) -> bool:
    """Whether x holds no NaN and no infinity; True on meta tensors.

    A sum takes one pass and is finite only if every number is (NaN and infinity survive any sum). Only a sum that is
    not (it may merely have overflowed) makes the exact test necessary, which costs ten times as much.
    """
    if x.is_meta:
        return True
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())
