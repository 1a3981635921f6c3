"""Tail: the lines that were added to a growing file since it was last looked at, a few megabytes at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 2**22  # of a look at one file
MOST_LINE_BYTES = 2**16  # a longer one is cut in two, where lines are text


@dataclass(frozen=True)
class Tail:
    """What was added: whole lines, without their ends; `offset` is where the next look goes on."""

    lines: list[bytes]
    offset: int
    more: bool  # whether the file has more than one look takes


def read_tail(path: Path, offset: int, *, last: bool = False, cuts: bool = True) -> Tail:
    """The whole lines from `offset` on; last: nothing will follow, so that one without an end counts, too.
    cuts: whether a line that is long already is taken before it is whole; else only one beyond what a look takes is.

    A file that is shorter than `offset` was begun anew, and is read from its start. Empty where there is no file.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            offset = offset if offset <= size else 0
            file.seek(offset)
            block = file.read(MOST_BYTES)
    except OSError:
        return Tail([], offset, more=False)
    more = offset + len(block) < size
    whole = len(block) if last and not more else block.rfind(b"\n") + 1
    if not whole and len(block) > (MOST_LINE_BYTES if cuts else MOST_BYTES - 1):
        whole = len(block)
    lines = block[:whole].removesuffix(b"\n").split(b"\n") if whole else []
    return Tail(lines, offset + whole, more)
