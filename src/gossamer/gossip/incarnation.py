"""A worker that was lost and comes back is in its next life: nobody may take the words of one for those of another."""

from __future__ import annotations

LIFE_STEPS = 2**32  # more than a worker ever makes in one life; 2**31 lives fit beside them in 63 bits
MOST_DIGITS = 9


def numbered(life: int, step: int) -> int:
    """The number of a worker's step in its `life`, which counts from 0: beyond all steps of the lives before."""
    return life * LIFE_STEPS + step


def life_in(number: int) -> int:
    """In which life a step of this number was made."""
    return number // LIFE_STEPS


def written_life(life: int) -> str:
    """What goes beside a word about it: nothing for the first."""
    return str(life) if life else ""


def read_life(text: str) -> int:
    """What `written_life` gave; -1, which nobody has, for what it never gives."""
    if not text:
        return 0
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else -1
