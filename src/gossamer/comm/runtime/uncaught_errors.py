"""Uncaught errors: the traceback of an error that this library raised on purpose ends in the user's own line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch

from gossamer.errors import GossamerError

TRACEBACK = "GOSSAMER_TRACEBACK"  # "full" shows all frames and causes
STANDARD_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"
LIBRARIES = tuple(f"{package}{os.sep}" for package in (Path(__file__).parents[2], Path(torch.__file__).parent))


def install() -> None:
    """Let uncaught errors of this library be shown short, on every rank; calling it again changes nothing."""
    before = sys.excepthook
    if getattr(before, "__module__", None) == __name__:
        return

    def show(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        shown = shortened(error, where)
        before(kind, error.with_traceback(shown), shown)  # the interpreter's own hook goes by the error's

    sys.excepthook = show


def shortened(error: BaseException, where: TracebackType | None) -> TracebackType | None:
    """The traceback of `error` from `where` on, up to the last line that is the user's, and no other error before it.

    An error that says what to write instead needs no frames of the code that found it. All of them, and the causes,
    where GOSSAMER_TRACEBACK is "full", where the error is none of ours, and where no frame is the user's.
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


def _frames(where: TracebackType | None) -> Iterator[TracebackType]:
    while where is not None:
        yield where
        where = where.tb_next


def is_users(frame: TracebackType) -> bool:
    """Whether it is in neither this library, nor torch, nor the standard library, which has site-packages within."""
    name = frame.tb_frame.f_code.co_filename
    standard = name.startswith(STANDARD_LIBRARY) and "site-packages" not in name
    return not (standard or name.startswith((*LIBRARIES, "<frozen ")))
