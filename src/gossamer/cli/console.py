"""Console output that commands share: wrapped text, progress on standard error, tables without lines."""

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

ShowText = Callable[[str], None]
FILE_COLUMNS = 240  # for text in a file or a pipe
NARROWEST = 24  # columns for a sentence next to a term; with fewer it is below the term


def wide_console(width: int) -> Console:
    """Console on standard output. width: columns of a table in a file."""
    return SafeConsole(highlight=False, width=None if sys.stdout.isatty() else width)


def columns(stream: TextIO) -> int:
    """Columns of a stream: $COLUMNS, or the terminal's width; FILE_COLUMNS without a terminal or if it has no size."""
    chosen = os.environ.get("COLUMNS", "")
    if chosen.isdecimal() and int(chosen) > 0:
        return int(chosen)
    return (os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0) or FILE_COLUMNS


def wrapped(text: str, width: int) -> str:
    """Wrap the text between words to lines of at most `width` columns; continuation lines keep the indentation.

    A longer word, such as a path, is not broken.
    """
    return "\n".join(_wrapped_line(line, width) for line in text.split("\n"))


def in_columns(terms: Sequence[tuple[str, str]], width: int, indent: str = "  ") -> Iterator[str]:
    """Lines of terms with a sentence each. The sentences have their own column, or are below their terms if `width` is
    small."""
    column = len(indent) + max(len(term) for term, _ in terms) + 2
    for term, sentence in terms:
        if column + NARROWEST > width:
            yield f"{_wrapped_line(indent + term, width)}\n{_wrapped_line(f'{indent}    {sentence}', width)}"
        else:
            first = f"{indent}{term}".ljust(column)
            yield first + _wrapped_line(" " * column + sentence, width)[column:]


def echo(text: str) -> None:
    """Print to standard output, without control sequences."""
    click.echo(without_controls(text), file=sys.stdout)  # without `file`, click writes UTF-8 to an ASCII stream


def print_text(text: str, *, error: bool = False) -> None:
    """Print to standard error, wrapped between words, without control sequences.

    error: whether the text is an error, shown in red if the terminal has colors.
    """
    lines = wrapped(without_controls(text), columns(sys.stderr))
    click.secho(lines, fg="red" if error else None, bold=error, err=True)


def _wrapped_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line  # unchanged: a mark below a letter keeps its column
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
def progress(first: str, plain_seconds: float = 0.0) -> Iterator[ShowText]:
    """One line that changes, beginning with `first`. Without a terminal, a line every `plain_seconds`."""
    aside = SafeConsole(stderr=True, highlight=False)
    if not aside.is_terminal:
        yield _now_and_then(aside, plain_seconds)
        return
    with aside.status(Text(first)) as status:
        yield lambda sentence: status.update(Text(sentence))


def _now_and_then(aside: Console, seconds: float) -> ShowText:
    last_shown = time.monotonic()

    def print_text(sentence: str) -> None:
        nonlocal last_shown
        if time.monotonic() >= last_shown + seconds:
            last_shown = time.monotonic()
            aside.print(f"gossamer: {sentence}", soft_wrap=True, markup=False)

    return print_text


def table(columns: Sequence[str], left: Collection[str] = (), no_wrap: Collection[str] = ()) -> Table:
    """A table without rows. Columns are aligned to the right, except those in `left`."""
    shown = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        shown.add_column(name.strip(), justify="left" if name in left else "right", no_wrap=name in no_wrap)
    return shown
