"""Console output that commands share: text that breaks at words, progress on standard error, tables without lines."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gossamer.observe.control_sequences import SafeConsole, without_controls

Say = Callable[[str], None]
FILE_COLUMNS = 240  # of text that goes into a file or a pipe
NARROWEST = 24  # columns for a sentence beside a term; where there are fewer it stands below


def wide_console(width: int) -> Console:
    """Standard output; `width` is a table's that goes into a file."""
    return SafeConsole(highlight=False, width=None if sys.stdout.isatty() else width)


def columns(stream: TextIO) -> int:
    """The width of what is shown there: $COLUMNS, or the terminal's; FILE_COLUMNS where it is none."""
    chosen = os.environ.get("COLUMNS", "")
    if chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else FILE_COLUMNS


def wrapped(text: str, width: int) -> str:
    """The text with lines of at most `width` columns, broken between words; each goes on below its own beginning.

    A word that is longer, such as a path, stays whole.
    """
    return "\n".join(_wrapped_line(line, width) for line in text.split("\n"))


def beside(terms: Sequence[tuple[str, str]], width: int, indent: str = "  ") -> Iterator[str]:
    """Lines of terms and a sentence each: the sentences stand in a column of their own, or below where it is narrow."""
    column = len(indent) + max(len(term) for term, _ in terms) + 2
    for term, sentence in terms:
        if column + NARROWEST > width:
            yield f"{_wrapped_line(indent + term, width)}\n{_wrapped_line(f'{indent}    {sentence}', width)}"
        else:
            first = f"{indent}{term}".ljust(column)
            yield first + _wrapped_line(" " * column + sentence, width)[column:]


def echo(text: str) -> None:
    """Print to standard output, without control sequences."""
    click.echo(without_controls(text), file=sys.stdout)  # or click writes UTF-8 where that is ASCII


def say(text: str, *, error: bool = False) -> None:
    """Print to standard error, broken between words, without control sequences.

    error: what went wrong, in red where there are colors.
    """
    lines = wrapped(without_controls(text), columns(sys.stderr))
    click.secho(lines, fg="red" if error else None, bold=error, err=True)


def _wrapped_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line  # as it is, so that a mark below a letter stays there
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line.strip(),
        max(width, len(indent) + 1),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


@contextmanager
def progress(first: str, plain_seconds: float = 0.0) -> Iterator[Say]:
    """One line that changes, at first `first`; without a terminal, a line every `plain_seconds`."""
    aside = SafeConsole(stderr=True, highlight=False)
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
