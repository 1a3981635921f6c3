"""Stacks: the newest Python stacks of all ranks, from faulthandler's text; equal ones are merged."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gossamer.base import bounded_file
from gossamer.base.units import ranks_text

HEAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)[^(]*\(most recent call first\):")
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
PACKAGE = f"{Path(__file__).parents[1]}/"
LIBRARIES = re.compile(r"/(?:lib/python3[^/]*|site-packages|dist-packages)/|^<frozen ")


@dataclass(frozen=True)
class Frame:
    """A line of a thread's stack."""

    file: str
    line: int
    function: str

    @property
    def is_gossamer_frame(self) -> bool:
        return self.file.startswith(PACKAGE)

    @property
    def is_users(self) -> bool:
        return not self.is_gossamer_frame and not LIBRARIES.search(self.file)

    @property
    def place(self) -> str:
        return f"{Path(self.file).name}:{self.line}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


MOST_STACK_BYTES = 2**22  # of a rank's file to read
Stack = tuple[Frame, ...]  # of one thread, the innermost line first


def read_stacks(path: Path) -> str:
    """The end of a rank's file of stacks, with the newest dump. Raises OSError."""
    return bounded_file.read_end(path, MOST_STACK_BYTES).decode(errors="replace")


def newest_dump(text: str) -> tuple[Stack, ...]:
    """The threads of the last dump in a file, the main thread first; () without a dump.

    faulthandler writes threads from the newest to the oldest, so the main thread ends each dump.
    """
    heads = list(HEAD.finditer(text))
    if not heads:
        return ()
    main, first = heads[-1][1], len(heads) - 1
    while first > 0 and heads[first - 1][1] != main:
        first -= 1
    ends = [*(head.start() for head in heads[first + 1 :]), len(text)]
    return tuple(_stack(text[head.end() : end]) for head, end in zip(heads[first:], ends, strict=True))[::-1]


def _stack(text: str) -> Stack:
    return tuple(Frame(file, int(line), function) for file, line, function in FRAME.findall(text))


def where(stack: Stack) -> str:
    """Short description: the innermost line of the user's code, and the function of Gossamer that it called."""
    users = next((depth for depth, frame in enumerate(stack) if frame.is_users), None)
    library_frame = next((frame for frame in stack[:users] if frame.is_gossamer_frame), None)
    inside = f"in gossamer's {library_frame.function} ({library_frame.place})" if library_frame is not None else ""
    if users is None:
        return inside or (f"at {stack[0].place} in {stack[0].function}" if stack else "nowhere in Python")
    frame = stack[users]
    return f"{inside} from {frame.place}" if inside else f"at {frame.place} in {frame.function}"


def side_by_side(
    dumps: Mapping[int, Sequence[Stack]],
    steps: Mapping[int, int],
    threads: bool = False,
    notes: Mapping[int, str] | None = None,
) -> list[str]:
    """Lines to show, with groups of ranks that have equal stacks. The smallest groups come first, since the ranks that
    others wait for are seldom in the largest one.

    Args:
        dumps: threads by rank, the main one first.
        steps: last completed step by rank, from its event log, which is written once a second.
        threads: show all threads instead of the main thread only.
        `notes`: current operation by rank.
    """
    groups: dict[tuple[tuple[Stack, ...], str], list[int]] = {}
    for rank in sorted(dumps):
        shown = tuple(dumps[rank]) if threads else tuple(dumps[rank][:1])
        groups.setdefault((shown, (notes or {}).get(rank, "")), []).append(rank)
    lines = []
    for (stacks, place), ranks in sorted(groups.items(), key=lambda group: (len(group[1]), group[1])):
        main = stacks[0] if stacks else ()
        lines.append(f"{ranks_text(ranks)}: {where(main)}{', ' * bool(place)}{place or _after(ranks, steps)}")
        for number, stack in enumerate(stacks):
            lines += [f"  another thread, {where(stack)}"] if number else []
            lines += [f"    {frame}" for frame in _from_script(stack)]
    return lines


def _from_script(stack: Stack) -> Stack:
    """Frames from the outermost one of the script inwards, without those that start the script."""
    outermost = next((depth for depth in reversed(range(len(stack))) if stack[depth].is_users), len(stack) - 1)
    return stack[: outermost + 1][::-1]


def _after(ranks: Sequence[int], steps: Mapping[int, int]) -> str:
    known = [steps[rank] for rank in ranks if rank in steps]
    return f", step {min(known)} or later" if known else ""
