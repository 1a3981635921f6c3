"""Signal handlers: installed for a block, except for signals that the process was started to ignore."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from gossamer.base import system

Handler = Callable[[int, FrameType | None], object]

STOP_SIGNALS = system.signals("SIGINT", "SIGTERM", "SIGHUP")


def is_ignored(number: int) -> bool:
    """Whether this process ignores the signal, as SIGHUP after `nohup`, or SIGINT after `command &` in a script."""
    return signal.getsignal(number) == signal.SIG_IGN


@contextmanager
def handling(handler: Handler, *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals until the block ends. Call it in the main thread.

    Args:
        handler: Called with the signal's number and the current frame.
        numbers: The signals. An ignored signal remains ignored.
    """
    before = {number: signal.signal(number, handler) for number in numbers if not is_ignored(number)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
