"""Control sequences in untrusted text: removed, except colors if requested."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

STRING = r"\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # a title, a link, a device's string, with its end
CSI = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"
ESCAPE = r"\x1b[ -/]*[0-~]?"
CONTROL = r"[\x00-\x08\x0a-\x1f\x7f-\x9f]"  # all except tab
SEQUENCE = re.compile(f"{STRING}|{CSI}|{ESCAPE}|{CONTROL}")
COLOR = re.compile(r"\x1b\[[0-9;:]*m")


def without_controls(text: str, *, colors: bool = False) -> str:
    """Remove sequences that move the cursor, clear the screen, rename the window or answer the terminal. Line ends are
    kept. colors: whether to keep color sequences."""
    return "\n".join(SEQUENCE.sub(_color if colors else "", line) for line in text.split("\n"))


def in_one_line(text: str) -> str:
    """The same as without_controls, for a name within a line: line ends become spaces."""
    return without_controls(text).replace("\n", " ")


class SafeConsole(Console):
    """A console for untrusted text, such as names of metrics, hosts and clients, and errors: removes its sequences.

    Colors and cursor movements that Rich itself writes are kept. Brackets and colons in the text have no meaning: Rich
    would take `[top1]` for a style, and `:x:` for a picture.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else without_controls(text), style, control)


def _color(sequence: re.Match[str]) -> str:
    return sequence[0] if COLOR.fullmatch(sequence[0]) else ""
