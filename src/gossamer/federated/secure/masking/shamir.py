"""Shamir secret sharing: splits 32 bytes into shares, of which any `threshold` give them back and fewer tell nothing.

A share is the value at its place of a random polynomial over the prime field of PRIME whose value at 0 is the secret.
source: Shamir 1979, Communications of the ACM
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

from gossamer.errors import MalformedError, require

SECRET_BYTES = 32
SHARE_BYTES = 33
PRIME = 2**256 + 297  # the smallest above every secret


def split(secret: bytes, threshold: int, places: Sequence[int]) -> dict[int, bytes]:
    """A share of SHARE_BYTES for each of the places, which are distinct and above 0."""
    require(len(secret) == SECRET_BYTES, f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
    require(
        0 < threshold <= len(set(places)) == len(places) and min(places) > 0,
        f"{threshold} of {len(places)} shares cannot give a secret back: places are distinct and above 0",
    )
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {place: _value(coefficients, place).to_bytes(SHARE_BYTES, "big") for place in places}


def join(shares: Mapping[int, bytes]) -> bytes:
    """The secret of at least `threshold` shares by place; of fewer, or of wrong ones, 32 other bytes.

    Raises MalformedError for a share that is no number of the field, and where no secret has these shares.
    """
    secret = _interpolated(shares, 0)
    if secret.bit_length() > 8 * SECRET_BYTES:
        raise MalformedError(f"shares at the places {sorted(shares)} belong to no secret: one of them was changed")
    return secret.to_bytes(SECRET_BYTES, "big")


def share_at(shares: Mapping[int, bytes], place: int) -> bytes:
    """The share at one more place that goes with these, which are at least `threshold`. Raises MalformedError."""
    return _interpolated(shares, place).to_bytes(SHARE_BYTES, "big")


def _interpolated(shares: Mapping[int, bytes], at: int) -> int:
    places = tuple(sorted(shares))
    values = [_number(place, shares[place]) for place in places]
    return sum(value * weight for value, weight in zip(values, _weights(places, at), strict=True)) % PRIME


def _value(coefficients: Sequence[int], place: int) -> int:
    total = 0
    for coefficient in reversed(coefficients):
        total = (total * place + coefficient) % PRIME
    return total


def _number(place: int, share: bytes) -> int:
    number = int.from_bytes(share, "big")
    if len(share) != SHARE_BYTES or number >= PRIME:
        raise MalformedError(f"what was given as the share at place {place} is none")
    return number


@lru_cache(maxsize=64)
def _weights(places: tuple[int, ...], at: int) -> tuple[int, ...]:
    """Lagrange's weights: the same for all secrets that the same holders share."""
    weights = []
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above, below = above * (other - at) % PRIME, below * (other - place) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)
