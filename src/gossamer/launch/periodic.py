"""Periodic task: calls an action every few milliseconds in a thread, since the engine needs the main one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import TracebackType

from gossamer.comm.runtime.signal_handlers import STOP_SIGNALS


class PeriodicTask:
    """Calls `action` every `seconds` in a thread until the block ends, then once more.

    An error of `action` interrupts the main thread and is raised at the end of the block.
    """

    def __init__(self, seconds: float, action: Callable[[], None]) -> None:
        self._seconds = seconds
        self._action = action
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> PeriodicTask:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._action()

    def _run(self) -> None:
        try:
            while not self._over.wait(self._seconds):
                self._action()
        except BaseException as error:
            self._error = error
            if (number := _handled_stop_signal()) is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, number)


def _handled_stop_signal() -> signal.Signals | None:
    """A signal that interrupts the main thread: SIGINT, unless this process ignores it."""
    return next((number for number in STOP_SIGNALS if callable(signal.getsignal(number))), None)
