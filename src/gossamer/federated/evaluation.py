"""Evaluation: the metrics of versions by the user's function, and the condition that ends a federation."""

from __future__ import annotations

import operator
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.base import rng
from gossamer.errors import LoopError
from gossamer.events import notice
from gossamer.federated.client.functions import ClientFunction, Round, Update
from gossamer.federated.federation import RoundConfig, config_by_round
from gossamer.federated.model_state import ModelState


class Evaluator:
    """Tells the metrics of versions."""

    def __init__(
        self,
        function: ClientFunction,
        model: nn.Module,
        state: ModelState,
        *,
        seed: int = 0,
        config: RoundConfig | None = None,
    ) -> None:
        """model: is overwritten. config: as devices are told it."""
        self._function, self._model, self._state = function, model, state
        self._seed, self._config = seed, config_by_round(config)

    def metrics(self, version: int, parameters: Tensor) -> dict[str, float]:
        """Of a version, by its parameters: (n,). Its Round has the index of the round that made it, from 0. No
        gradients are computed, unless the function asks for them by torch.enable_grad().

        Raises LoopError for what is no Update, and what the function raises.
        """
        self._state.write(parameters, self._model)
        self._model.eval()
        index = version - 1
        seed = rng.address(self._seed, "evaluate", version) >> 11
        with torch.no_grad():
            told = Round(
                index=index, client=None, config={} if self._config is None else self._config(index), seed=seed
            )
            update = self._function(self._model, told)
        if not isinstance(update, Update):
            raise LoopError(
                f"The evaluation returned {update!r}, and its metrics go into the record. End it with `return "
                'gossamer.federated.Update(samples=len(data), metrics={"accuracy": accuracy})`.'
            )
        return dict(update.metrics)


COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


@dataclass(frozen=True)
class StopCondition:
    """A metric compared with a number, such as accuracy>0.95."""

    metric: str
    comparison: str
    limit: float

    @classmethod
    def read(cls, text: str) -> StopCondition:
        """Raises ValueError."""
        found = re.fullmatch(r"\s*([^<>=\s]+)\s*(>=|<=|>|<)\s*(\S+)\s*", text)
        try:
            if found is None:
                raise ValueError
            return cls(found[1], found[2], float(found[3]))
        except ValueError:
            raise ValueError(
                f"{text!r} is no metric compared with a number, so it would never end: write accuracy>0.95"
            ) from None

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Not in a round that does not tell the metric: some evaluate every few rounds only."""
        return self.metric in metrics and bool(COMPARISONS[self.comparison](metrics[self.metric], self.limit))

    def check_told(self, rounds: Sequence[Mapping[str, float]]) -> None:
        """Notice, at the end, that no round told the metric. rounds: the metrics of each."""
        names = {name for metrics in rounds for name in metrics}
        if self.metric not in names:
            notice(
                f"Nothing told {self.metric!r}, so the federation could not end by {self}; there are: "
                f"{', '.join(sorted(names)) or 'no metrics'}. Return it from the function that is marked "
                f'evaluate: Update(samples=n, metrics={{"{self.metric}": ...}})'
            )

    def __str__(self) -> str:
        return f"{self.metric}{self.comparison}{self.limit:g}"


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
