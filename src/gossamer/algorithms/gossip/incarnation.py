"""Incarnation numbers: a worker that was lost and comes back gets the next one, so that stale messages are rejected."""

from __future__ import annotations

STEPS_PER_INCARNATION = 2**32  # more than a worker ever makes in one; 2**31 incarnations fit beside them in 63 bits
MOST_DIGITS = 9


def with_incarnation(incarnation: int, step: int) -> int:
    """The number of a worker's step in its `incarnation`, from 0: beyond all steps of the incarnations before."""
    return incarnation * STEPS_PER_INCARNATION + step


def incarnation_of(number: int) -> int:
    """In which incarnation a step of this number was made."""
    return number // STEPS_PER_INCARNATION


def encode_incarnation(incarnation: int) -> str:
    """As text beside a push: empty for the first."""
    return str(incarnation) if incarnation else ""


def decode_incarnation(text: str) -> int:
    """The incarnation that `encode_incarnation` wrote; -1, which no worker has, for any other text."""
    if not text:
        return 0
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else -1
