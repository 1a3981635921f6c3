"""Counter-based random numbers: a function of key and place, so that any loop can draw them in any order."""

from __future__ import annotations

import torch
from torch import Tensor

LOW = 0xFFFFFFFF
APART = 16  # places that share a hash
BITS = 24


def uniform(key: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """(n,) float32 in [0, 1), multiples of 2^-24, for the places 0 to n-1 under a 63-bit key.

    u(j) = mix((j * 0x9E3779B9 + low(key)) xor high(key)) >> 8, all modulo 2^32. The mixing step is lowbias32 by
    Wellons 2018 ("Prospecting for hash functions").
    """
    return (_hashes(key, n, device) >> 8).float() * 2.0**-BITS


def paired(key: int, n: int, device: torch.device | str = "cpu", bits: int = BITS) -> Tensor:
    """(n,) int32: the upper `bits` of the 32 drawn for each place; two places share one hash.

    Of every 32 places, j and 16 + j get hash j + 16 (place // 32), the latter with its halves exchanged. So each number
    is as uniform as the hash, to the last bit, and the first 16 bits of the two have nothing in common; those behind
    them do: their joint probabilities are those of independent numbers, up to 2^-15. That is enough
    where each entry has to be right on average, and costs half the hashes.
    """
    groups = -(-n // (2 * APART))
    first = _hashes(key, groups * APART, device).view(-1, 1, APART)
    second = ((first << 16) & LOW) | (first >> 16)
    return (torch.cat([first, second], 1).view(-1)[:n] >> (32 - bits)).int()


def stochastic(w: Tensor, unit: Tensor, most: int, key: int) -> Tensor:
    """(n,) int32: floor(w / unit + u) between -most and most, 0 where the unit is; most: below 2^15, one for all.

    In fixed point, with u = paired(key, n, bits) / 2^bits and as many bits, at most 24, as (most + 1) 2^bits <= 2^31
    allows. Digits of w / unit behind these are cut off, and nothing else is lost: the average is wrong by less than
    2^-24 of a unit, or where `most` is above 127 by less than 2^-30 of the largest number, below float32's resolution.
    """
    bits = min(BITS, 31 - most.bit_length())
    lift = torch.where(unit < 2.0**-100, 2.0**100, 1.0).to(w.dtype)  # one over the unit stays finite
    per_unit = torch.where(unit == 0, torch.zeros_like(unit), torch.full_like(unit, 2.0**bits) / (unit * lift))
    fixed = (w * lift * per_unit).clamp(-most * 2**bits, most * 2**bits).int()
    return (fixed + paired(key, len(w), w.device, bits)) >> bits


def _hashes(key: int, n: int, device: torch.device | str) -> Tensor:
    """(n,) int64: 32 random bits each."""
    place = torch.arange(n, dtype=torch.int64, device=device)
    return _mix((place * 0x9E3779B9 + (key & LOW)) & LOW ^ (key >> 32))


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers, held in 64 bits."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & LOW
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & LOW
    return x ^ (x >> 16)
