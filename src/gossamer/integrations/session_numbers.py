"""Session numbers: adds up steps, bytes and seconds of this worker's session between two reports to another library."""

from __future__ import annotations

from collections.abc import Callable

from gossamer import events
from gossamer.events import Event, StepEnded

PREFIX = "gossamer/"


class SessionNumbers:
    """A listener for the steps of this process's session."""

    def __init__(self) -> None:
        self._forget()

    def watch(self) -> Callable[[], None]:
        """Hear of every step from now on; returns the function that ends it."""
        return events.subscribe(self, shows_notices=False)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepEnded):
            self._steps += 1
            self._skipped += event.skipped
            self._seconds += event.seconds
            self._waiting_seconds += event.waiting_seconds
            self._bytes_sent += event.bytes_sent

    def take(self) -> dict[str, float]:
        """What the steps since the last call took, each on average; none of them where there was no step.

        gossamer/steps and gossamer/skipped are counts; gossamer/step_seconds is a step's time, of which the training
        thread waited gossamer/waiting_seconds for others; gossamer/bytes_per_step is this worker's payload.
        """
        if not (steps := self._steps):
            return {}
        told = {
            "steps": steps,
            "skipped": self._skipped,
            "step_seconds": self._seconds / steps,
            "waiting_seconds": self._waiting_seconds / steps,
            "bytes_per_step": self._bytes_sent / steps,
        }
        self._forget()
        return {f"{PREFIX}{name}": value for name, value in told.items()}

    def _forget(self) -> None:
        self._steps = self._skipped = 0
        self._seconds = self._waiting_seconds = self._bytes_sent = 0.0
