"""Routed output: sends what a worker prints where its own output goes, and what others print where it went before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

#: Of the running thread, and of communication threads that it makes; None: as before.
sink: ContextVar[TextIO | None] = ContextVar("gossamer_sink", default=None)


class RoutedStream:
    """Stands in for a standard stream: everything is the running worker's own, or else that stream's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(sink.get() or self._stream, name)


@contextmanager
def routed() -> Iterator[None]:
    """Within the block standard output and errors of threads that have a sink go there."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (RoutedStream(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
