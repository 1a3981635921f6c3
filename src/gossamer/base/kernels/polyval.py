"""POLYVAL hashes a payload by a secret key at the speed of memory, compiled; there is no other implementation.

By itself it authenticates nothing: its value has to go through a keyed function that hides it.
"""

from __future__ import annotations

import ctypes

import numpy as np

from gossamer.base.kernels.library import MISFIT, Count, Function, Pointer, library, wanted_kernels

KEY_BYTES = HASH_BYTES = 16
_POWERS_BYTES, _RUNNING_BYTES = 512, 40  # in kernels-src/polyval.cpp

_POWERS = Function("gossamer_polyval_powers", Pointer, Pointer)
_UPDATE = Function("gossamer_polyval_update", Pointer, Pointer, Pointer, Count)
_DIGEST = Function("gossamer_polyval_digest", Pointer, Pointer, Pointer)


def available() -> bool:
    """Whether it was compiled, and the processor multiplies without carry."""
    if wanted_kernels() == "reference" or library() is None:
        return False
    return _POWERS(bytes(KEY_BYTES), ctypes.create_string_buffer(_POWERS_BYTES)) != MISFIT


class PolyvalKey:
    """A point of GF(2^128) as 16 secret bytes, and its powers. Where `available`."""

    def __init__(self, key: bytes) -> None:
        assert len(key) == KEY_BYTES
        self._powers = ctypes.create_string_buffer(_POWERS_BYTES)
        _POWERS(key, self._powers)

    def begin(self) -> Polyval:
        """The hash of nothing yet."""
        return Polyval(self._powers)


class Polyval:
    """A hash of bytes that come piece by piece.

    hash = X_1 H^n + ... + X_n H    blocks of 16 bytes, the last one filled up with zeros
    law:    two texts of one length have one hash for at most n of 2^128 keys
    source: Gueron, Langley, Lindell 2019, RFC 8452
    """

    def __init__(self, powers: ctypes.Array[ctypes.c_char]) -> None:
        self._memory = powers, ctypes.create_string_buffer(_RUNNING_BYTES + HASH_BYTES)
        self._powers, self._running = map(ctypes.addressof, self._memory)

    def update(self, data: memoryview) -> None:
        """Add contiguous bytes."""
        _UPDATE(self._powers, self._running, _address(data), data.nbytes)

    def digest(self) -> bytes:
        """16 bytes; more may follow."""
        _DIGEST(self._powers, self._running, self._running + _RUNNING_BYTES)
        return self._memory[1].raw[_RUNNING_BYTES:]


def _address(data: memoryview) -> int:
    if data.readonly or not data.nbytes:  # ctypes shows the address of neither
        return int(np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
