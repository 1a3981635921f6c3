"""Uncaught errors: the traceback of an error that this library raised on purpose ends at the user's own line."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch

from gossamer.errors import GossamerError

TRACEBACK = "GOSSAMER_TRACEBACK"  # "full" prints all frames and causes
STANDARD_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"
LIBRARIES = tuple(f"{package}{os.sep}" for package in (Path(__file__).parents[2], Path(torch.__file__).parent))


def install() -> None:
    """Shorten the tracebacks of this library's uncaught errors, on every rank. Idempotent."""
    before = sys.excepthook
    if getattr(before, "__module__", None) == __name__:
        return

    def show(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        shown = shortened(error, where)
        before(kind, error.with_traceback(shown), shown)  # the interpreter's own hook uses the error's traceback

    sys.excepthook = show


def shortened(error: BaseException, where: TracebackType | None) -> TracebackType | None:
    """Return the traceback of `error` from `where` up to the last line of the user's code, and remove its causes.

    An error with a remedy does not need the frames of the code that detected it. The full traceback is returned if
    GOSSAMER_TRACEBACK is "full", if the error is not from this library, or if no frame is the user's.
    """
    frames = list(_frames(where))
    users = [place for place, frame in enumerate(frames) if is_users(frame)]
    if not isinstance(error, GossamerError) or os.environ.get(TRACEBACK) == "full" or not users:
        return where
    error.__cause__, error.__suppress_context__ = None, True
    shown: TracebackType | None = None
    for frame in reversed(frames[: users[-1] + 1]):
        shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shown


def summary_of(error: BaseException) -> str:
    """Return the class and the message of an error, without the notes that were added to it."""
    printed = traceback.TracebackException.from_exception(error)
    printed.__notes__ = []
    return list(printed.format_exception_only())[-1].strip()


def _frames(where: TracebackType | None) -> Iterator[TracebackType]:
    while where is not None:
        yield where
        where = where.tb_next


def is_users(frame: TracebackType) -> bool:
    """Whether it is outside of this library, torch and the standard library (its folder contains site-packages)."""
    name = frame.tb_frame.f_code.co_filename
    standard = name.startswith(STANDARD_LIBRARY) and "site-packages" not in name
    return not (standard or name.startswith((*LIBRARIES, "<frozen ")))
