"""Random numbers that depend on nothing but a key and a place, so that any loop can draw them in any order."""

from __future__ import annotations

import torch
from torch import Tensor

LOW = 0xFFFFFFFF


def uniform(key: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """(n,) float32 in [0, 1), multiples of 2^-24, for the places 0 to n-1 under a 63-bit key.

    u(j) = mix((j * 0x9E3779B9 + low(key)) xor high(key)) >> 8, all modulo 2^32. The mixing step is lowbias32 by
    Wellons 2018 ("Prospecting for hash functions").
    """
    place = torch.arange(n, dtype=torch.int64, device=device)
    return (_mix((place * 0x9E3779B9 + (key & LOW)) & LOW ^ (key >> 32)) >> 8).float() * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers, held in 64 bits."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & LOW
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & LOW
    return x ^ (x >> 16)
