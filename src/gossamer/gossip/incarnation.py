"""A worker that was lost and comes back is in its next life: nobody may take the words of one for those of another."""

from __future__ import annotations

STEPS_PER_INCARNATION = 2**32  # more than a worker ever makes in one life; 2**31 lives fit beside them in 63 bits
MOST_DIGITS = 9


def with_incarnation(life: int, step: int) -> int:
    """The number of a worker's step in its `life`, which counts from 0: beyond all steps of the lives before."""
    return life * STEPS_PER_INCARNATION + step


def incarnation_of(number: int) -> int:
    """In which life a step of this number was made."""
    return number // STEPS_PER_INCARNATION


def encode_incarnation(life: int) -> str:
    """What goes beside a word about it: nothing for the first."""
    return str(life) if life else ""


def decode_incarnation(text: str) -> int:
    """What `written_life` gave; -1, which nobody has, for what it never gives."""
    if not text:
        return 0
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else -1
