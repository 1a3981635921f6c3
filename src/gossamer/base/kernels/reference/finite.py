"""Range checks: whether numbers can be sent and added up."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from gossamer.errors import MalformedError, OutOfRange

HEADROOM = 1024  # largest factor between a decoded value and the numbers in its payload


def within_range(x: Tensor, terms: float) -> bool:
    """Return whether all of x is finite and a sum of `terms` such numbers stays within the range of its dtype.

    Args:
        x: (n,), floating-point numbers.
        terms: number of summands, usually of workers.
    """
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


@lru_cache(maxsize=1024)
def summing_terms(dtype: torch.dtype, payloads: int) -> float:
    """Return the number of times that a payload's number must fit into the range of its dtype.

    Then `payloads` decoded payloads can be summed, in at least float32.
    """
    widest = torch.finfo(torch.promote_types(dtype, torch.float32)).max
    return max(1.0, HEADROOM * payloads * (torch.finfo(dtype).max / widest))


def summable(numbers: Tensor, payloads: int) -> bool:
    """Whether a payload's numbers are finite, and `payloads` such payloads can be decoded and summed."""
    return within_range(numbers, summing_terms(numbers.dtype, payloads))


def expect_summable(numbers: Tensor, payloads: int) -> None:
    """Raise MalformedError if numbers are not finite, and OutOfRange if the sum of `payloads` payloads overflows."""
    if summable(numbers, payloads):
        return
    if all_finite(numbers):
        raise OutOfRange("a payload holds numbers that are too large to be added up: its sender's gradients overflow")
    raise MalformedError("a payload holds numbers that are not finite, and no encoder sends such ones")
