"""Range checks in one pass at memory bandwidth; unsupported inputs use plain torch."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gossamer.base.kernels.dispatch import kernel
from gossamer.base.kernels.library import Count, Function, Pointer, serves
from gossamer.base.kernels.reference import finite
from gossamer.errors import NotFinite

_MAGNITUDES = Function("gossamer_magnitudes", *[Pointer] * 2, Count, Pointer)


@kernel(finite.within_range)
def within_range(x: Tensor, terms: float) -> bool:
    if not serves(x, types=(torch.float32,)):
        return finite.within_range(x, terms)
    numel, found = Count(x.numel()), ctypes.c_float()
    try:
        _MAGNITUDES(x.data_ptr(), ctypes.byref(numel), 1, ctypes.byref(found))
    except NotFinite:
        return False
    return found.value <= torch.finfo(x.dtype).max / terms


@kernel(finite.summable)
def summable(numbers: Tensor, payloads: int) -> bool:
    return within_range(numbers, finite.summing_terms(numbers.dtype, payloads))
