"""Checks in one pass at memory bandwidth: the range of numbers, and CRC-32; without kernels, plain torch and zlib."""

from __future__ import annotations

import ctypes
import zlib

import numpy as np
import torch
from torch import Tensor

from gossamer.base.kernels.library import Count, Function, Pointer, kernel, library, serves, wanted_kernels
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


SHORT = 2**13  # bytes that zlib has done before a call of a compiled loop has begun

_CRC32 = Function("gossamer_crc32", Pointer, Count, Count)


def crc32(data: memoryview, before: int = 0) -> int:
    """Return the CRC-32 of these contiguous bytes, continued from the CRC-32 `before`; equals zlib.crc32.

    Finds every change of up to 32 bits that follow each other; of others all but one in 2^32.
    """
    if data.nbytes < SHORT or wanted_kernels() == "reference" or library() is None:
        return zlib.crc32(data, before)
    start = np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0]
    return _CRC32(start, data.nbytes, before)
