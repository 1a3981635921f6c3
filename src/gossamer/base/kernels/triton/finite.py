"""Range checks in one pass over a GPU's memory."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.base.kernels.reference import finite
from gossamer.base.kernels.triton.launch import EXACT, TILE, serves, tiles
from gossamer.base.kernels.triton.status import OUT_OF_RANGE, found, fresh, report
from gossamer.base.kernels.triton.wanted import raw, widened


@triton.jit
def _out_of_range(x, status, numel, limit, tile: tl.constexpr):
    place = tl.program_id(0) * tile + tl.arange(0, tile)
    number = widened(tl.load(x + place, mask=place < numel, other=0))
    report(status, ~(tl.abs(number) <= limit), OUT_OF_RANGE)  # NaN is not below anything


def within_range(x: Tensor, terms: float) -> bool:
    """As reference.finite.within_range."""
    if not serves(x):
        return finite.within_range(x, terms)
    if not x.numel():
        return True
    status = fresh(x.device)
    report_range(x, terms, status)
    return not found(status)


def report_range(x: Tensor, terms: float, status: Tensor) -> None:
    """Report OUT_OF_RANGE unless within_range(x, terms); of a buffer that is served."""
    limit = largest_sendable(x.dtype, terms)
    if x.numel():
        _out_of_range[tiles(x.numel())](raw(x), status, x.numel(), limit, tile=TILE, **EXACT)


@lru_cache(maxsize=256)
def largest_sendable(dtype: torch.dtype, terms: float) -> float:
    """The largest number of which `terms` can be added up, as plain torch compares with it: rounded to that type."""
    return float(torch.tensor(torch.finfo(dtype).max / terms, dtype=dtype))


def summable(numbers: Tensor, payloads: int) -> bool:
    """As reference.finite.summable."""
    return within_range(numbers, finite.summing_terms(numbers.dtype, payloads))
