"""Baton: lets one of several threads run user code at a time; the others wait in line for it."""

from __future__ import annotations

import threading
from collections import deque

from gossamer.plan.simulate.process_state import ProcessState


class Baton:
    """Who holds it runs, and finds the process in a state of its own. `outside`: the state while nobody holds it."""

    def __init__(self, outside: ProcessState) -> None:
        self._outside = self._installed = outside
        self._lock, self._line = threading.Lock(), deque[threading.Lock]()
        self._held = False

    def take(self, state: ProcessState) -> None:
        """Wait in line for it."""
        granted = threading.Lock()
        granted.acquire()
        with self._lock:
            if not self._held:
                self._held = True
                granted.release()
            else:
                self._line.append(granted)
        granted.acquire()
        self._install(state)

    def give(self) -> None:
        """Let the next in line have it. By the thread that holds it."""
        with self._lock:
            self._held = bool(self._line)
            if self._line:
                self._line.popleft().release()

    def lay_down(self) -> None:
        """Nobody takes it for a while: the process is as it was before."""
        self.take(self._outside)
        self.give()

    def _install(self, state: ProcessState) -> None:
        if state is not self._installed:
            self._installed.keep()
            self._installed = state
            state.restore()
