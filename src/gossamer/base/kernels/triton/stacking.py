"""Stacking: payloads as rows of one buffer, which a kernel walks along without their addresses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from gossamer.base.kernels.triton.launch import serves


def fit(tensors: Sequence[Tensor], dtype: torch.dtype, numel: int, like: Tensor) -> bool:
    """Whether these are so many numbers of a type each, where `like` is."""
    alike = all(each.shape == (numel,) and each.device == like.device for each in tensors)
    return alike and serves(*tensors, types=(dtype,))


def stacked(tensors: Sequence[Tensor]) -> tuple[Tensor, int]:
    """(payloads, n), and how far a row is from the next. Rows that lie evenly spaced in one buffer stay where they
    are, as those of a gathered one do; others are copied side by side."""
    first = tensors[0]
    apart = {b.storage_offset() - a.storage_offset() for a, b in pairwise(tensors)} or {0}
    together = all(each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for each in tensors)
    if not (together and len(apart) == 1 and min(apart) >= 0):
        return torch.stack(list(tensors)), len(first)
    step = int(min(apart))
    return first.as_strided((len(tensors), len(first)), (step, 1)), step
