"""Masks: what one device adds the other takes away, streams are uniform, and cut anywhere they are the same."""

from __future__ import annotations

import numpy as np
import pytest
from support.chi_square import byte_z

from gossamer.federated.secure_aggregation.masking import CHUNK_BYTES, add_mask, pairwise_sign


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.uint64])
def test_a_mask_is_taken_away_again(dtype: type) -> None:
    before = np.arange(1000).astype(dtype)
    vector = before.copy()
    add_mask(vector, b"k" * 32, pairwise_sign(1, 2))
    assert (vector != before).sum() > 990
    add_mask(vector, b"k" * 32, pairwise_sign(2, 1))
    assert vector.tolist() == before.tolist()


def test_a_long_stream_is_one_stream() -> None:
    """Longer than a chunk: as RFC 8439's ChaCha20 in one call, and the second chunk does not repeat the first."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    count = CHUNK_BYTES // 4 * 2 + 3
    vector = np.zeros(count, np.uint32)
    add_mask(vector, b"k" * 32, 1)
    whole = Cipher(algorithms.ChaCha20(b"k" * 32, bytes(16)), mode=None).encryptor().update(bytes(4 * count))
    assert vector.tobytes() == whole


def test_streams_are_uniform_and_have_nothing_in_common() -> None:
    one, other = np.zeros(20_000, np.uint32), np.zeros(20_000, np.uint32)
    add_mask(one, b"1" * 32, 1)
    add_mask(other, b"2" * 32, 1)
    assert byte_z(one) < 4.5
    assert byte_z(one - other) < 4.5
    assert byte_z(one - one) > 100  # the twin: one key for both
