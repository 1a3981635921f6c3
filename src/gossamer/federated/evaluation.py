"""Evaluation: the metrics of versions by the user's function, and the condition that ends a federation."""

from __future__ import annotations

import operator
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor, nn

from gossamer.base import rng
from gossamer.base.units import exact_text
from gossamer.errors import LoopError
from gossamer.events import notice
from gossamer.federated.client.functions import ClientFunction, Round, Update
from gossamer.federated.federation import RoundConfig, config_by_round
from gossamer.federated.model_state import ModelState


class Evaluator:
    """Computes the metrics of versions by the user's function."""

    def __init__(
        self,
        function: ClientFunction,
        model: nn.Module,
        state: ModelState,
        *,
        seed: int = 0,
        config: RoundConfig | None = None,
    ) -> None:
        """model: is overwritten. config: as sent to devices."""
        self._function, self._model, self._state = function, model, state
        self._seed, self._config = seed, config_by_round(config)

    def metrics(self, version: int, parameters: Tensor) -> dict[str, float]:
        """Metrics of a version with parameters (n,).

        The function receives a Round with the index of the round that made the version, from 0. It runs under
        torch.no_grad(), and can use torch.enable_grad().

        Raises LoopError if the function does not return an Update, and exceptions of the function.
        """
        self._state.write(parameters, self._model)
        self._model.eval()
        index = version - 1
        seed = rng.address(self._seed, "evaluate", version) >> 11
        with torch.no_grad():
            round_config = Round(
                index=index, client=None, config={} if self._config is None else self._config(index), seed=seed
            )
            update = self._function(self._model, round_config)
        if not isinstance(update, Update):
            raise LoopError(
                f"The evaluation returned {update!r}, but must return an Update with metrics. End it with `return "
                'gossamer.federated.Update(samples=len(data), metrics={"accuracy": accuracy})`.'
            )
        return dict(update.metrics)


COMPARISONS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


@dataclass(frozen=True)
class StopCondition:
    """A condition on a metric, such as accuracy>0.95."""

    metric: str
    comparison: str
    limit: float

    @classmethod
    def read(cls, text: str) -> StopCondition:
        """Parse a condition. Raises ValueError."""
        found = re.fullmatch(r"\s*([^<>=\s]+)\s*(>=|<=|>|<)\s*(\S+)\s*", text)
        try:
            if found is None or not isfinite(float(found[3])):
                raise ValueError
            return cls(found[1], found[2], float(found[3]))
        except ValueError:
            raise ValueError(
                f"{text!r} is not a metric compared with a number, so the run would never end: write accuracy>0.95"
            ) from None

    def reached(self, metrics: Mapping[str, float]) -> bool:
        """Whether the condition is met; False for a round without the metric, since some evaluate every few rounds."""
        return self.metric in metrics and bool(COMPARISONS[self.comparison](metrics[self.metric], self.limit))

    def notice_if_missing(self, rounds: Sequence[Mapping[str, float]]) -> None:
        """Give notice, at the end, if no round had the metric. rounds: the metrics of each."""
        names = {name for metrics in rounds for name in metrics}
        if self.metric not in names:
            notice(
                f"No round reported {self.metric!r}, so the federation could not end by {self}; there are: "
                f"{', '.join(sorted(names)) or 'no metrics'}. Return it from the function that is marked "
                f'evaluate: Update(samples=n, metrics={{"{self.metric}": ...}})'
            )

    def __str__(self) -> str:
        return f"{self.metric}{self.comparison}{exact_text(self.limit)}"


MOST_WAITING = 2  # versions; if evaluation is slower than rounds, versions in between are skipped
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class _Due:
    """A version to evaluate; without parameters it is only passed on, in order."""

    version: int
    parameters: Tensor | None
    then: Callable[[Metrics | None], None]


class Evaluation:
    """Evaluates versions in a thread, and calls `then` for every version in order, with its metrics or None."""

    def __init__(self, evaluator: Evaluator | None) -> None:
        self._evaluator = evaluator
        self._changed = threading.Condition()
        self._due: deque[_Due] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="gossamer evaluation", daemon=True)
        self._thread.start()

    def submit(self, version: int, parameters: Tensor, then: Callable[[Metrics | None], None]) -> None:
        """Queue a version. parameters: (n,), copied."""
        with self._changed:
            waiting = [place for place, due in enumerate(self._due) if due.parameters is not None]
            if len(waiting) >= MOST_WAITING:
                left_out = self._due[waiting[0]]
                self._due[waiting[0]] = _Due(left_out.version, None, left_out.then)
            copied = None if self._evaluator is None else parameters.clone()
            self._due.append(_Due(version, copied, then))
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Finish pending evaluations, for at most `seconds`."""
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
            except Exception as error:  # such as a full disk or a broken pipe; continue with later versions
                notice(f"The record of version {due.version} cannot be kept, and the rounds continue: {error!r}")

    def _metrics(self, due: _Due) -> Metrics | None:
        if self._evaluator is None or due.parameters is None:
            return None
        try:
            return self._evaluator.metrics(due.version, due.parameters)
        except Exception as error:  # of the user's function; the rounds continue
            notice(f"The evaluation of version {due.version} failed, and the rounds continue without it: {error!r}")
            return None
