"""Evaluation: runs the user's evaluation function on versions, in a thread of its own, while the rounds go on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic

import torch
from torch import Tensor, nn

from gossamer.events import notice
from gossamer.federated.client.functions import ClientFunction, Round, Update
from gossamer.federated.model_state import ModelState

MOST_WAITING = 2  # versions; where evaluating is slower than rounds are, versions in between are left out
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class _Due:
    """A version to be evaluated; without parameters it is only passed on, in its turn."""

    parameters: Tensor | None
    then: Callable[[Metrics | None], None]
    index: int


class Evaluation:
    """Calls `then` of every version in order, with its metrics where it was evaluated."""

    def __init__(self, function: ClientFunction | None, model: nn.Module, state: ModelState) -> None:
        self._function, self._model, self._state = function, model, state
        self._changed = threading.Condition()
        self._due: deque[_Due] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="gossamer evaluation", daemon=True)
        self._thread.start()

    def submit(self, index: int, parameters: Tensor, then: Callable[[Metrics | None], None]) -> None:
        """parameters: (n,), copied. index: of the round that made them."""
        with self._changed:
            waiting = [place for place, due in enumerate(self._due) if due.parameters is not None]
            if len(waiting) >= MOST_WAITING:
                left_out = self._due[waiting[0]]
                self._due[waiting[0]] = _Due(None, left_out.then, left_out.index)
            copied = None if self._function is None else parameters.clone()
            self._due.append(_Due(copied, then, index))
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Finish what is due, for at most so many seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        until = monotonic() + seconds
        self._thread.join(max(until - monotonic(), 0.0))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closed)
                if not self._due:
                    return
                due = self._due.popleft()
            due.then(None if due.parameters is None else self._metrics(due.index, due.parameters))

    def _metrics(self, index: int, parameters: Tensor) -> Metrics | None:
        assert self._function is not None
        self._state.write(parameters, self._model)
        self._model.eval()
        try:
            with torch.no_grad():
                update = self._function(self._model, Round(index=index, client=None))
        except Exception as error:  # of the user's; the devices' work goes on
            notice(f"The evaluation of round {index} failed, and the rounds go on without it: {error!r}")
            return None
        return dict(update.metrics) if isinstance(update, Update) else None
