"""Ring: no sum of as many summands as it counts leaves it, and packed numbers come back bit for bit."""

from __future__ import annotations

from math import ceil, log2

import numpy as np
import pytest

from gossamer.errors import MalformedError
from gossamer.federated.secure_aggregation.masking import SumRing


@pytest.mark.parametrize("bits", [2, 3, 8, 16, 31, 32])
@pytest.mark.parametrize("summands", [1, 2, 3, 5, 100, 128, 10_000])
def test_a_sum_at_the_limit_does_not_overflow(bits: int, summands: int) -> None:
    ring = SumRing(bits, summands)
    assert ring.width <= bits + ceil(log2(summands))
    for most in (ring.largest, -ring.largest):
        each = ring.wrapped(np.full(1, most))
        total = (each.astype(np.uint64) * np.uint64(summands)).astype(ring.dtype)  # modulo the ring
        assert ring.centered(total).tolist() == [summands * most]


@pytest.mark.parametrize(("bits", "summands"), [(8, 3), (16, 100), (32, 100)])
def test_a_ring_one_bit_smaller_would_overflow(bits: int, summands: int) -> None:
    ring = SumRing(bits, summands)
    most = summands * ring.largest
    assert 2 ** (ring.width - 2) <= most < 2 ** (ring.width - 1)
    smaller = SumRing(bits, 1)
    assert smaller.centered(np.array([most % 2**smaller.width], smaller.dtype)).tolist() != [most]


@pytest.mark.parametrize("summands", [1, 2, 100, 5000])
@pytest.mark.parametrize("bits", [2, 7, 8, 9, 16, 17, 32])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_packed_numbers_come_back(bits: int, summands: int, count: int) -> None:
    ring = SumRing(bits, summands)
    vector = np.random.default_rng(count).integers(0, 2**63, count).astype(ring.dtype)
    packed = ring.packed(vector)
    assert len(packed) == ring.wire_bytes(count) <= count * ring.width / 8 + 7
    assert ring.unpacked(packed, count).tolist() == (vector & ring.dtype.type(2**ring.width - 1)).tolist()


def test_every_bit_of_the_bytes_tells_something() -> None:
    ring = SumRing(16, 100)
    assert (ring.width, ring.wire_bytes(10**6)) == (23, 2_875_000)
    packed = ring.packed(np.zeros(16, ring.dtype))
    seen = set()
    for bit in range(8 * len(packed)):
        changed = packed.copy()
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(tuple(ring.unpacked(changed, 16).tolist()))
    assert len(seen) == 16 * 23


def test_what_does_not_fit_is_refused() -> None:
    ring = SumRing(8, 5)
    for wrong in (128, -128):
        with pytest.raises(ValueError, match="overflow"):
            ring.wrapped(np.array([0, wrong]))
    for packed in (np.zeros(3, np.uint8), np.zeros(11, np.int8), np.zeros((2, 4), np.uint8)):
        with pytest.raises(MalformedError, match="masked numbers of 11 bits are 11 bytes"):
            ring.unpacked(packed, 8)
    with pytest.raises(ValueError, match="leave 64 bits"):
        SumRing(32, 2**33)
