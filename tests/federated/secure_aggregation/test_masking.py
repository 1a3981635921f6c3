"""Masking: sums in a ring, keys and streams, masks that cancel, secrets in shares."""

from __future__ import annotations

import secrets
import sys
from itertools import combinations
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chi_square import byte_z

from gossamer.errors import AttachError, MalformedError
from gossamer.federated.secure_aggregation import masking as shamir
from gossamer.federated.secure_aggregation.masking import (
    CHUNK_BYTES,
    PRIME,
    SHARE_BYTES,
    AgreementKey,
    SumRing,
    add_mask,
    commitment,
    join,
    opened,
    pairwise_sign,
    require_cryptography,
    sealed,
    share_at,
    split,
)


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


def test_both_ends_agree_on_a_key_for_each_purpose() -> None:
    one, two = AgreementKey(), AgreementKey()
    assert one.agreed(two.public, b"masks") == two.agreed(one.public, b"masks") != one.agreed(two.public, b"shares")
    assert AgreementKey(one.private).public == one.public
    for public in (bytes(32), b"short"):  # of small order, and none
        with pytest.raises(MalformedError, match="invalid public key"):
            one.agreed(public, b"masks")


def test_the_curve_is_the_standards() -> None:
    """RFC 7748, section 6.1: Alice's keys."""
    private = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c1f9e5f5c1f9e5f5c1f9e5f5c1f9e")
    assert AgreementKey(private).private == private


def test_what_was_sealed_opens_unchanged_only() -> None:
    key = b"k" * 32
    closed = sealed(key, b"shares", b"for one")
    assert opened(key, closed, b"for one") == b"shares"
    changed = bytes([closed[0] ^ 1]) + closed[1:]
    for wrong in (opened(key, changed, b"for one"), opened(b"l" * 32, closed, b"for one"), opened(key, closed, b"")):
        assert wrong is None
    assert commitment(b"1" * 32) != commitment(b"2" * 32)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    require_cryptography.cache_clear()
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.x25519", None)
    with pytest.raises(AttachError, match=r"pip install 'gossamer\[federated\]'"):
        require_cryptography()
    monkeypatch.undo()
    require_cryptography()


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


SECRETS = st.binary(min_size=32, max_size=32)


def is_prime(number: int) -> bool:
    """Miller and Rabin, by the first twelve primes."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        power = pow(base, odd, number)
        if power not in (1, number - 1) and all((power := power * power % number) != number - 1 for _ in range(twos)):
            return False
    return True


def test_the_field_is_one_and_holds_every_secret() -> None:
    assert is_prime(PRIME)
    assert not is_prime(PRIME - 2)
    assert 2**256 <= PRIME < 2 ** (8 * SHARE_BYTES)


@settings(max_examples=40, deadline=None)
@given(secret=SECRETS, holders=st.integers(1, 12), data=st.data())
def test_any_threshold_of_shares_give_the_secret_back(secret: bytes, holders: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(1, holders))
    places = data.draw(st.lists(st.integers(1, 10**6), min_size=holders, max_size=holders, unique=True))
    shares = split(secret, threshold, places)
    kept = data.draw(st.lists(st.sampled_from(places), min_size=threshold, unique=True))
    assert join({place: shares[place] for place in kept}) == secret
    assert all(share_at({place: shares[place] for place in kept}, place) == shares[place] for place in places)


def test_every_set_of_three_of_five() -> None:
    secret = secrets.token_bytes(32)
    shares = split(secret, 3, [1, 2, 3, 4, 5])
    assert {join({place: shares[place] for place in kept}) for kept in combinations(shares, 3)} == {secret}


def test_fewer_shares_fit_to_every_secret() -> None:
    """For each other secret there is a third share that goes with the same two."""
    shares = split(bytes(32), 3, [1, 2, 3])
    known = {1: shares[1], 2: shares[2]}
    for other in (1, 2**255, 2**256 - 1):
        third = share_at(known | {0: other.to_bytes(SHARE_BYTES, "big")}, 3)
        assert join(known | {3: third}) == other.to_bytes(32, "big")


def test_shares_are_spread_over_the_field() -> None:
    """The first bits of shares of one secret by 4,000 polynomials: chi-square over 16 values, z below 4.5."""

    def spread(shares: list[bytes]) -> float:
        counts = [0] * 16
        for share in shares:
            counts[int.from_bytes(share, "big") >> 252 & 15] += 1
        square = sum((count - len(shares) / 16) ** 2 for count in counts) / (len(shares) / 16)
        return float((square - 15) / 30**0.5)

    assert abs(spread([split(bytes(32), 2, [7, 8])[7] for _ in range(4000)])) < 4.5
    assert spread([split(bytes(32), 1, [7])[7] for _ in range(4000)]) > 100  # the twin: a polynomial of degree 0


def test_an_invalid_share_is_refused() -> None:
    shares = split(bytes(32), 2, [1, 2])
    for broken in (b"", shares[2][1:], b"\xff" * SHARE_BYTES):
        with pytest.raises(MalformedError, match="place 2"):
            join(shares | {2: broken})
    for threshold, places in ((3, [1, 2]), (0, [1]), (1, [0, 1]), (1, [1, 1])):
        with pytest.raises(ValueError, match="shares"):
            split(bytes(32), threshold, places)
    with pytest.raises(ValueError, match="32 bytes"):
        split(bytes(31), 1, [1])


def test_weights_add_up_to_one() -> None:
    """The constant polynomial is its own value everywhere."""
    for places in ((1,), (1, 2, 3), (5, 9, 100, 1000)):
        for at in (0, 4):
            assert sum(shamir._weights(places, at)) % PRIME == 1
