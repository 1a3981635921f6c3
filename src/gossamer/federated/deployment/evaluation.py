"""Evaluation: runs the user's evaluation function on versions, in a thread of its own, while the rounds go on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from gossamer.events import notice
from gossamer.federated.evaluator import Evaluator

MOST_WAITING = 2  # versions; where evaluating is slower than rounds are, versions in between are left out
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class _Due:
    """A version to be evaluated; without parameters it is only passed on, in its turn."""

    version: int
    parameters: Tensor | None
    then: Callable[[Metrics | None], None]


class Evaluation:
    """Calls `then` of every version in order, with its metrics where it was evaluated."""

    def __init__(self, evaluator: Evaluator | None) -> None:
        self._evaluator = evaluator
        self._changed = threading.Condition()
        self._due: deque[_Due] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="gossamer evaluation", daemon=True)
        self._thread.start()

    def submit(self, version: int, parameters: Tensor, then: Callable[[Metrics | None], None]) -> None:
        """parameters: (n,), copied."""
        with self._changed:
            waiting = [place for place, due in enumerate(self._due) if due.parameters is not None]
            if len(waiting) >= MOST_WAITING:
                left_out = self._due[waiting[0]]
                self._due[waiting[0]] = _Due(left_out.version, None, left_out.then)
            copied = None if self._evaluator is None else parameters.clone()
            self._due.append(_Due(version, copied, then))
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Finish what is due, for at most so many seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closed)
                if not self._due:
                    return
                due = self._due.popleft()
            metrics = self._metrics(due)
            try:
                due.then(metrics)
            except Exception as error:  # a full disk, a pipe that nobody reads; later versions are evaluated, too
                notice(f"The record of version {due.version} cannot be kept, and the rounds go on: {error!r}")

    def _metrics(self, due: _Due) -> Metrics | None:
        if self._evaluator is None or due.parameters is None:
            return None
        try:
            return self._evaluator.metrics(due.version, due.parameters)
        except Exception as error:  # of the user's; the devices' work goes on
            notice(f"The evaluation of version {due.version} failed, and the rounds go on without it: {error!r}")
            return None
