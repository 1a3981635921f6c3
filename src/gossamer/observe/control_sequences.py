"""Control sequences in text from elsewhere: only colors reach the terminal, where they are wanted."""

from __future__ import annotations

import re

STRING = r"\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # a title, a link, a device's string, with its end
CSI = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
ESCAPE = r"\x1b[ -/]*[0-~]?"
CONTROL = r"[\x00-\x08\x0a-\x1f\x7f-\x9f]"  # all but the tabulator
SEQUENCE = re.compile(f"{STRING}|{CSI}|{ESCAPE}|{CONTROL}")
COLOR = re.compile(r"\x1b\[[0-9;:]*m")


def without_controls(text: str, *, colors: bool = False) -> str:
    """The text without what would move the cursor, clear the screen, rename the window or answer the terminal; ends of
    lines stay. colors: whether those stay, too."""
    return "\n".join(SEQUENCE.sub(_color if colors else "", line) for line in text.split("\n"))


def _color(sequence: re.Match[str]) -> str:
    return sequence[0] if COLOR.fullmatch(sequence[0]) else ""
