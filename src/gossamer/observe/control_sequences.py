"""Control sequences in text from elsewhere: only colors reach the terminal, where they are wanted."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

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


def in_one_line(text: str) -> str:
    """As without_controls, for a name within a line: an end of a line becomes a space."""
    return without_controls(text).replace("\n", " ")


class SafeConsole(Console):
    """A console whose text cannot steer the terminal, such as names of metrics, hosts and clients, and errors.

    Colors and cursor movements of Rich itself are no text, and remain.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else without_controls(text), style, control)


def _color(sequence: re.Match[str]) -> str:
    return sequence[0] if COLOR.fullmatch(sequence[0]) else ""
