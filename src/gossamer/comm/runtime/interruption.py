"""Interruption: Ctrl-C takes effect after the same step on every rank, so that they can save together."""

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
    """Handler of SIGINT, which workers get at the same time and in different steps.

    An open session is asked to stop, as all agree to, and raises KeyboardInterrupt where it would raise Stopped. Where
    it has not within `patience_seconds`, because the script is not in its loop or a step takes longer, and where there
    is no session, KeyboardInterrupt is raised where the script is.
    """

    def __init__(self) -> None:
        self.pending = False  # asked for, and not raised yet
        self._foreseen = False  # raised, and the signal is still to come
        self._asked: Callable[[], bool] = lambda: False
        self._sessions: Sequence[OpenSession] = ()  # that were asked to stop

    def install(self, patience_seconds: float, asked: Callable[[], bool], timer: Timer = threading.Timer) -> None:
        """Handle SIGINT from now on, unless it is ignored; call it in the main thread.

        asked: whether all workers are being sent the signal, so that one who learns of it from another need not wait
        for its own.
        """
        self._patience_seconds, self._asked, self._timer = patience_seconds, asked, timer
        if not is_ignored(signal.SIGINT):
            signal.signal(signal.SIGINT, self._on_signal)

    def error(self) -> BaseException:
        """What a session raises after the step in which training was stopped."""
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
        if self.pending and not all(session.should_stop for session in self._sessions):  # a loop that broke off goes on
            _thread.interrupt_main()


current = Interruption()  # of this process
