"""Preemption: lets one worker leave an elastic run within seconds of SIGTERM while the others go on."""

from __future__ import annotations

import _thread
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from gossamer import events
from gossamer.base.run_files import RUN_DIRECTORY, RunFiles
from gossamer.errors import Stopped

PATIENCE_SECONDS = 1.0  # for the step under way; then the others make its exchange again without this worker


class PreemptionHandler:
    """Handler of SIGTERM where nothing else handles it. At the next step this worker leaves, and its script ends with
    exit code 0; where all workers of the run are asked, they end training together instead.

    leave: leaves the run; stop: asks all workers to end after the same step.
    """

    def __init__(self, leave: Callable[[], object], stop: Callable[[], object]) -> None:
        self._leave, self._stop, self._pending = leave, stop, False
        self.left = False

    def install(self) -> None:
        """Handle the signal from now on, in the main thread."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)

    def look(self) -> None:
        """Between two steps: leave by raising Stopped, if that was asked for."""
        if not self._pending:
            return
        self._pending = False
        if _all_are_asked():
            self._stop()
        else:
            self._go()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            self._pending = False
            self._go()
        self._pending = True
        timer = threading.Timer(PATIENCE_SECONDS, self._insist)
        timer.daemon = True
        timer.start()

    def _insist(self) -> None:
        if self._pending and not _all_are_asked():
            _thread.interrupt_main(signal.SIGTERM)

    def _go(self) -> None:
        self.left = True
        self._leave()
        events.emit(events.LeftRun())
        raise Stopped


def _all_are_asked() -> bool:
    directory = os.environ.get(RUN_DIRECTORY)
    return directory is not None and RunFiles(Path(directory)).stopping.exists()
