"""Shamir shares: any `threshold` of them give the secret back, fewer fit to every secret, changed ones are noticed."""

from __future__ import annotations

import secrets
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.errors import MalformedError
from gossamer.federated.secure_aggregation import masking as shamir
from gossamer.federated.secure_aggregation.masking import PRIME, SHARE_BYTES, join, share_at, split

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


def test_what_is_no_share_is_refused() -> None:
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
