"""Signal handlers: installed for a block, and never over a signal that the process was started to ignore."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_ignored(number: int) -> bool:
    """Whether this process ignores the signal: `nohup` sets SIGHUP so, and a shell script SIGINT for `command &`."""
    return signal.getsignal(number) == signal.SIG_IGN


@contextmanager
def handling(handler: Handler, *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals until the block ends. Call it in the main thread.

    Args:
        handler: called with the signal's number and the current frame.
        numbers: the signals. A signal that is ignored stays ignored.
    """
    before = {number: signal.signal(number, handler) for number in numbers if not is_ignored(number)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
