"""Masks: adds streams of uniform members of a ring to a vector, or takes them away again."""

from __future__ import annotations

import numpy as np

from gossamer.federated.secure.masking.primitives import CHUNK_BYTES, KeyStream
from gossamer.federated.secure.masking.ring import RingVector


def add_mask(vector: RingVector, key: bytes, sign: int) -> None:
    """vector += sign PRG(key), in place. sign: 1 or -1; key: 256 bits, of one mask."""
    stream, buffer = KeyStream(key), bytearray(CHUNK_BYTES)
    each = CHUNK_BYTES // vector.itemsize
    apply = np.add if sign > 0 else np.subtract
    for start in range(0, len(vector), each):
        piece = vector[start : start + each]
        stream.fill(memoryview(buffer)[: piece.nbytes])
        apply(piece, np.frombuffer(buffer, vector.dtype, len(piece)), out=piece)


def pairwise_sign(own: int, other: int) -> int:
    """Of the mask that two devices share: the one adds what the other takes away."""
    return 1 if own < other else -1
