"""Interruption: Ctrl-C takes effect after the same step on every rank, so that all ranks can save together."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from gossamer.comm.runtime.open_sessions import OpenSession, open_sessions
from gossamer.comm.runtime.signal_handlers import is_ignored
from gossamer.errors import Stopped

Timer = Callable[[float, Callable[[], None]], threading.Timer]


class Interruption:
    """Handler of SIGINT, which workers receive at the same time but in different steps.

    An open session is requested to stop, on which all ranks agree, and raises KeyboardInterrupt instead of Stopped.
    KeyboardInterrupt is raised at the current line if there is no session, or if the session does not stop within
    `patience_seconds`, because the script is outside its loop or a step takes longer.
    """

    def __init__(self) -> None:
        self.pending = False  # requested and not raised yet
        self._foreseen = False  # raised before the signal arrived
        self._asked: Callable[[], bool] = lambda: False
        self._sessions: Sequence[OpenSession] = ()  # that were requested to stop

    def install(self, patience_seconds: float, asked: Callable[[], bool], timer: Timer = threading.Timer) -> None:
        """Handle SIGINT from now on, unless it is ignored. Call it in the main thread.

        Args:
            patience_seconds: How long a session may take to stop.
            asked: Whether all workers receive the signal, so that a worker that another one stops does not need to
                wait for its own signal.
            timer: Creates the timer; replaced in tests.
        """
        self._patience_seconds, self._asked, self._timer = patience_seconds, asked, timer
        if not is_ignored(signal.SIGINT):
            signal.signal(signal.SIGINT, self._on_signal)

    def error(self) -> BaseException:
        """Return the error that a session raises after the step in which training was stopped."""
        if not self.pending and not self._asked():
            return Stopped()
        self.pending, self._foreseen = False, not self.pending
        return KeyboardInterrupt()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._foreseen:
            self._foreseen = False
            return
        sessions = open_sessions()
        if self.pending or not sessions:
            self.pending = False
            raise KeyboardInterrupt
        self.pending = True
        self._sessions = sessions
        for session in sessions:
            session.request_stop()
        timer = self._timer(self._patience_seconds, self._insist)
        timer.daemon = True
        timer.start()

    def _insist(self) -> None:
        if self.pending and not all(session.should_stop for session in self._sessions):  # the loop has not ended
            _thread.interrupt_main()


current = Interruption()  # of this process
