"""Difference: the exact change of some bytes since an earlier copy of them, compressed.

Numbers of 32 bits that changed a little keep their sign, their exponent and the first bits of their mantissa. The
difference is therefore an exclusive or, whose bytes are grouped by their place in a word, and each group that zlib
shortens is compressed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gossamer.errors import MalformedError

WORD = 4  # bytes
SAMPLE_BYTES = 2**14  # of a group, to estimate whether it is worth compressing
WORTH = 0.9  # compressed over original size
LEVEL = 1  # of zlib

Bytes = npt.NDArray[np.uint8]


def encode_difference(part: Tensor, base: Tensor) -> list[Tensor]:
    """Return groups of bytes, from which `decode_difference` restores `part` ^ `base`.

    Args:
        part: uint8, one-dimensional.
        base: The earlier copy, of the same length.

    Returns:
        WORD groups, each compressed if it is shorter than its share of the words, and the remaining bytes.
    """
    changed = np.bitwise_xor(part.numpy(), base.numpy())
    words = len(part) // WORD * WORD
    groups = np.ascontiguousarray(changed[:words].reshape(-1, WORD).T)
    return [*map(_compressed, groups), torch.from_numpy(changed[words:])]


def decode_difference(groups: Sequence[Tensor], size: int) -> Tensor:
    """Return the exclusive or of two parts of `size` bytes. Raises MalformedError."""
    count = size // WORD
    if len(groups) != WORD + 1 or len(groups[-1]) != size - WORD * count:
        raise MalformedError(f"a difference of {size} bytes has invalid groups: {[len(each) for each in groups]}")
    changed = np.empty(size, dtype=np.uint8)
    words = changed[: WORD * count].reshape(count, WORD)
    for place, group in enumerate(groups[:WORD]):
        words[:, place] = _original(group.numpy(), count)
    changed[WORD * count :] = groups[-1].numpy()
    return torch.from_numpy(changed)


def _compressed(group: Bytes) -> Tensor:
    sample = np.ascontiguousarray(group[:: max(1, len(group) // SAMPLE_BYTES)])
    if len(zlib.compress(sample.data, LEVEL)) <= WORTH * len(sample):
        found = zlib.compress(group.data, LEVEL)
        if len(found) < len(group):
            return torch.frombuffer(bytearray(found), dtype=torch.uint8)
    return torch.from_numpy(group)


def _original(group: Bytes, count: int) -> Bytes:
    if len(group) == count:
        return group
    decoder = zlib.decompressobj()
    try:
        found = decoder.decompress(group.data, count + 1)
    except zlib.error as error:
        raise MalformedError(f"a compressed difference is damaged: {error}") from None
    if len(found) != count or not decoder.eof:
        raise MalformedError(f"a compressed difference has {len(found)} bytes or more, and {count} were expected")
    return np.frombuffer(found, dtype=np.uint8)
