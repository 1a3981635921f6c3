"""Deferred metrics: logs numbers that lie on a GPU once they are known, without the training loop waiting for them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from torch import Tensor

from gossamer import events
from gossamer.comm.runtime.comm_thread import CommThread, Work
from gossamer.errors import LoopError
from gossamer.train.session.scalars import logged_numbers


class DeferredMetrics:
    """Emits events.Logged: at once where all numbers are here, else from the communication thread, which may wait."""

    def __init__(self, comm_thread: CommThread) -> None:
        self._comm_thread = comm_thread
        self._last: Work[None] | None = None

    def log(self, step: int, metrics: Mapping[str, float | Tensor]) -> None:
        """Raises TypeError for what is no number. A tensor may be written to as soon as this returns."""
        if not any(map(_lies_elsewhere, metrics.values())):
            _emit(step, metrics)
            return
        kept = {name: each.detach().clone() if isinstance(each, Tensor) else each for name, each in metrics.items()}
        try:
            self._last = self._comm_thread.submit(partial(_emit, step, kept))
        except LoopError:  # the session is closed
            _emit(step, metrics)

    def finish(self) -> None:
        """The session ends: wait until all are told, unless the communication thread has failed."""
        if self._last is not None:
            with suppress(Exception):
                self._last.wait()


def _lies_elsewhere(value: float | Tensor) -> bool:
    """Whether the host would wait for it; what is refused is refused at once."""
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_cpu and not value.is_complex()


def _emit(step: int, metrics: Mapping[str, float | Tensor]) -> None:
    events.emit(events.Logged(step=step, values=logged_numbers(metrics)))
