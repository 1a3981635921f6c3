"""Session status: emits StepEnded for each step, adds up what this rank has sent, and is what print(session) shows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gossamer import events
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.base.tracing import active
from gossamer.base.transport import Transport
from gossamer.base.units import bytes_text
from gossamer.comm.runtime.worker_scope import current_worker
from gossamer.train.auto.measurement import MOST_STEPS, StepSeconds
from gossamer.train.engine.loop import StepCosts


class SessionStatus:
    """Counts the steps made since attach. step: the session's own counter, which a loaded checkpoint sets."""

    def __init__(self, recipe: Recipe, transport: Transport, step: Callable[[], int]) -> None:
        self.recipe, self._rank, self._world, self._step = recipe, transport.rank, transport.world, step
        self._worker = current_worker()
        self.clock: Callable[[], float] = self._worker.now
        self.timed: Callable[[float, StepCosts], StepSeconds] = step_seconds
        self.recent: deque[tuple[StepSeconds, float]] = deque(maxlen=MOST_STEPS)  # the last steps, and their bytes
        self._last_at, self.step_seconds = self.clock(), 0.0  # of the last step
        self._steps, self._bytes_sent = 0, 0.0
        self._data = DataWait()
        self.record = self.checkpoint = ""  # where they are

    def watch(self, model: nn.Module, optimizer: Optimizer) -> tuple[RemovableHandle, ...]:
        """Hooks that time the loop's data, where anybody listens."""
        return self._data.watch(model, optimizer) if events.observed() else ()

    def saved(self) -> None:
        """What the loop does from now on is for its next batch; what it did was saving."""
        self._data.begin()

    def step_ended(self, skipped: bool, costs: StepCosts) -> None:
        costs, now = self._worker.step_costs(costs), self.clock()
        if active.recorder is not None:
            active.recorder.step_ended(self._step(), self._last_at, now)
        seconds, self._last_at = now - self._last_at, now
        self._steps, self.step_seconds = self._steps + 1, seconds
        self._bytes_sent += (sent := costs.get("bytes_sent", 0.0))
        self.recent.append((self.timed(seconds, costs), sent))
        data = self._data.take()
        events.emit(events.StepEnded(step=self._step(), seconds=seconds, skipped=skipped, data_seconds=data, **costs))

    def text(self, parameters: Iterable[Tensor]) -> str:
        gradients = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        lines = [
            f"Session: rank {self._rank} of {self._world}, step {self._step()}",
            f"recipe: {self.recipe!r}",
            f"sent: {', '.join(self._traffic(gradients))}",
            f"record: {self.record or 'none'}; checkpoint: {self.checkpoint or 'none yet'}",
        ]
        return "\n  ".join(lines)

    def _traffic(self, gradient_bytes: int) -> Iterator[str]:
        dense = 2 * (self._world - 1) / self._world * gradient_bytes  # an all-reduce in every step
        if self._world == 1:
            yield "nothing, as a world of one"
        elif not self._steps:
            yield f"nothing yet; Dense() sends {bytes_text(dense)} a step"
        else:
            sent = self._bytes_sent / self._steps
            yield f"{bytes_text(sent)} a step"
            if sent:
                yield _compared(sent, dense)


def step_seconds(seconds: float, costs: StepCosts) -> StepSeconds:
    """Where a step's seconds went."""
    computing = costs.get("encode_seconds", 0.0) + costs.get("decode_seconds", 0.0)
    return StepSeconds(seconds, costs.get("waiting_seconds", 0.0), costs.get("wire_seconds", 0.0), computing)


def _compared(sent: float, dense: float) -> str:
    factor, kind = (dense / sent, "less") if sent <= dense else (sent / dense, "more")
    times = f"{factor:.3g}"
    return "as Dense()" if times == "1" else f"{times} times {kind} than Dense() ({bytes_text(dense)})"


class DataWait:
    """Adds up seconds between the end of the optimizer's step and the first forward pass after it.

    A forward pass that a compiler took in, hooks and all, is not seen: the seconds before it count as computing.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since: float | None = None
        self._seconds = 0.0

    def watch(self, model: nn.Module, optimizer: Optimizer) -> tuple[RemovableHandle, RemovableHandle]:
        """The hooks that see both, to be removed at the end. A microsecond or two a step."""
        return model.register_forward_pre_hook(self._forward), optimizer.register_step_post_hook(self._stepped)

    def begin(self) -> None:
        """From now on the loop is on its way to its next batch."""
        self._since = self._clock()

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _forward(self, model: nn.Module, inputs: Any) -> None:
        if self._since is not None and not torch.compiler.is_compiling():
            self._seconds += self._clock() - self._since
            self._since = None

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.begin()
