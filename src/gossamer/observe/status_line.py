"""Status line: one line of progress on standard error, in place on a terminal and now and then elsewhere."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from gossamer.observe.control_sequences import without_controls

PREFIX = "gossamer: "
FIRST_SECONDS = 2.0
TERMINAL_SECONDS = 0.5
PLAIN_SECONDS = 10.0  # where it is no terminal: a file, a pipe, a notebook
ERASE = "\r\x1b[K"


def standard_error() -> TextIO:
    """As it is now: notebooks and tests replace it."""
    return sys.stderr


class StatusLine:
    """Shows no text before FIRST_SECONDS and none too often; a stream that is closed or full ends no training."""

    def __init__(self, began: float, stream: Callable[[], TextIO] = standard_error) -> None:
        self._stream = stream
        self._next = began + FIRST_SECONDS
        self._unfinished = False  # whether the cursor stands behind a line that is to be overwritten

    def is_due(self, moment: float) -> bool:
        return moment >= self._next

    def show(self, text: str, moment: float) -> None:
        if self._on_terminal():
            self._next = moment + TERMINAL_SECONDS
            self._write(f"{ERASE}{(PREFIX + text)[: shutil.get_terminal_size().columns - 1]}")
            self._unfinished = True
        else:
            self._next = moment + PLAIN_SECONDS
            self._write(f"{PREFIX}{text}\n")

    def say(self, sentence: str) -> None:
        """A line that stays."""
        self._write(f"{ERASE if self._unfinished else ''}{PREFIX}{without_controls(sentence)}\n")
        self._unfinished = False

    def leave(self) -> None:
        """Something else is about to write a line."""
        if self._unfinished:
            self._write("\n")
            self._unfinished = False

    def _on_terminal(self) -> bool:
        try:
            return self._stream().isatty()
        except (AttributeError, ValueError):  # it is closed, or stands in for a stream
            return False

    def _write(self, text: str) -> None:
        with suppress(AttributeError, OSError, ValueError):
            stream = self._stream()
            stream.write(text)
            stream.flush()
