"""Addressed random numbers: the same address gives the same draws, on every rank and machine."""

from __future__ import annotations

import hashlib
from numbers import Integral

import torch


def address(*parts: object) -> int:
    """A 63-bit number that depends on every part and its type, and on nothing else (not on Python's own hash)."""
    text = "\x1f".join(f"{_kind(part)}={part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _kind(part: object) -> str:
    """The name of its type; a NumPy integer counts as an int."""
    return "int" if isinstance(part, Integral) and not isinstance(part, bool) else type(part).__name__


def generator(*parts: object) -> torch.Generator:
    """A private generator for this address, such as (seed, tensor name, step). torch's global one is never touched."""
    return torch.Generator().manual_seed(address(*parts))
