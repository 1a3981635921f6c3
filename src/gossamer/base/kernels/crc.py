"""CRC-32 at memory bandwidth; short inputs, and installations without compiled kernels, use zlib."""

from __future__ import annotations

import zlib

import numpy as np

from gossamer.base.kernels.library import Count, Function, Pointer, library, wanted_kernels

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
