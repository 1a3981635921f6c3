"""Console output that commands share: progress on standard error, and tables without lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

Say = Callable[[str], None]


def wide_console(width: int) -> Console:
    """Standard output; `width` is a table's that goes into a file."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else width)


@contextmanager
def progress(first: str, plain_seconds: float = 0.0) -> Iterator[Say]:
    """One line that changes, at first `first`; without a terminal, a line every `plain_seconds`."""
    aside = Console(stderr=True, highlight=False)
    if not aside.is_terminal:
        yield _now_and_then(aside, plain_seconds)
        return
    with aside.status(first) as status:
        yield lambda sentence: status.update(Text(sentence))


def _now_and_then(aside: Console, seconds: float) -> Say:
    said = time.monotonic()

    def say(sentence: str) -> None:
        nonlocal said
        if time.monotonic() >= said + seconds:
            said = time.monotonic()
            aside.print(f"gossamer: {sentence}", soft_wrap=True, markup=False)

    return say


def table(columns: Sequence[str], left: Collection[str] = (), no_wrap: Collection[str] = ()) -> Table:
    """A table without rows yet; columns are aligned to the right, but for those in `left`."""
    shown = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        shown.add_column(name.strip(), justify="left" if name in left else "right", no_wrap=name in no_wrap)
    return shown
