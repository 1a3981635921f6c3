"""Incarnation numbers: a restarted worker has the next number, so that stale messages are rejected."""

from __future__ import annotations

STEPS_PER_INCARNATION = 2**32  # more than a worker's steps in one; 2**31 incarnations fit into the other 31 of 63 bits
MOST_DIGITS = 9


def with_incarnation(incarnation: int, step: int) -> int:
    """Return the number of a worker's step in its `incarnation`, from 0: above all steps of earlier incarnations."""
    return incarnation * STEPS_PER_INCARNATION + step


def incarnation_of(number: int) -> int:
    """Return the incarnation of a step number."""
    return number // STEPS_PER_INCARNATION


def encode_incarnation(incarnation: int) -> str:
    """Return the text to send with a push: empty for the first incarnation."""
    return str(incarnation) if incarnation else ""


def decode_incarnation(text: str) -> int:
    """Return the incarnation that `encode_incarnation` wrote; -1, which no worker has, for any other text."""
    if not text:
        return 0
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else -1
