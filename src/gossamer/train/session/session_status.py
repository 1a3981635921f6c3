"""Session status: emits StepEnded for each step, and adds up bytes and seconds for print(session) and session.stats."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gossamer import events
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.base.html_table import html_table
from gossamer.base.spans import active
from gossamer.base.torch_hooks import ForwardHook, uncompiled
from gossamer.base.transport import Transport
from gossamer.base.units import bytes_text, seconds_text
from gossamer.comm.runtime.worker_scope import current_worker
from gossamer.train.auto.measurement import MOST_STEPS, StepSeconds
from gossamer.train.engine.loop import StepCosts

NO_COSTS: StepCosts = {}


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """Bytes and seconds of one step of this worker, or of several steps together.

    Bytes are payload: tensors as they travel and reports, without headers of the network.
    """

    steps: int
    bytes_sent: float
    bytes_received: float
    """From parameter servers; between workers equal to bytes_sent, which holds on average over the workers."""
    seconds: float
    """From the end of the previous step to the end of this one: compute_seconds + wait_seconds."""
    compute_seconds: float
    """Of the training thread: the model, the optimizer, and the loop's data."""
    wait_seconds: float
    """Of the training thread, for communication that was not hidden behind computing."""
    communication_seconds: float
    """Of the communication thread: encoding, sending, waiting for workers, decoding. It overlaps with the rest."""
    compression_ratio: float | None
    """Bytes that Dense() would send in as many steps, divided by bytes_sent; None where nothing was sent."""

    def __str__(self) -> str:
        if not self.steps:
            return "no step yet"
        ratio = "" if self.compression_ratio is None else f"; compression {self.compression_ratio:.3g}x"
        return (
            f"{self.steps} step{'s' * (self.steps != 1)} in {seconds_text(self.seconds)} "
            f"(compute {seconds_text(self.compute_seconds)}, wait {seconds_text(self.wait_seconds)}; "
            f"communication {seconds_text(self.communication_seconds)}); "
            f"sent {bytes_text(self.bytes_sent)}, received {bytes_text(self.bytes_received)}{ratio}"
        )


@dataclass(frozen=True, kw_only=True)
class SessionStats:
    """The last step of this worker, and all steps since attach."""

    last_step: StepStats
    run: StepStats

    def __str__(self) -> str:
        return f"last step: {self.last_step}\nrun: {self.run}"


class SessionStatus:
    """Counts the steps made since attach. step: the session's own counter, which a loaded checkpoint sets."""

    def __init__(self, recipe: Recipe, transport: Transport, step: Callable[[], int]) -> None:
        self.recipe, self._rank, self._world, self._step = recipe, transport.rank, transport.world, step
        self._worker = current_worker()
        self.clock: Callable[[], float] = self._worker.now
        self.timed: Callable[[float, StepCosts], StepSeconds] = step_seconds
        self.recent: deque[tuple[StepSeconds, float]] = deque(maxlen=MOST_STEPS)  # the last steps, and their bytes
        self._last_at, self.step_seconds = self.clock(), 0.0  # of the last step
        self._steps, self._bytes_sent, self._bytes_received = 0, 0.0, 0.0
        self._began_at, self._waiting, self._communicating = self._last_at, 0.0, 0.0  # seconds of all steps
        self._last, self._last_costs = StepSeconds(0.0, 0.0, 0.0, 0.0), NO_COSTS
        self._data: DataWait | None = None  # if an observer is subscribed
        self.record = self.checkpoint = ""  # paths

    @property
    def steps(self) -> int:
        """Number of steps made since attach."""
        return self._steps

    @property
    def has_sent(self) -> bool:
        """Whether a step since attach has sent data."""
        return self._bytes_sent > 0

    def watch(self, model: nn.Module, optimizer: Optimizer) -> tuple[RemovableHandle, ...]:
        """Return hooks that time the loop's data, if an observer is subscribed."""
        if not events.observed():
            return ()
        self._data = DataWait()
        return self._data.watch(model, optimizer)

    def saved(self) -> None:
        """Called after a save, so that its time does not count as waiting for data."""
        if self._data is not None:
            self._data.begin()

    def step_ended(self, skipped: bool, costs: StepCosts) -> None:
        now = self.clock()
        if self._worker.is_virtual:
            costs = self._worker.step_costs(costs)
        if active.recorder is not None:
            active.recorder.step_ended(self._step(), self._last_at, now)
        seconds, self._last_at = now - self._last_at, now
        self._steps, self.step_seconds = self._steps + 1, seconds
        self._bytes_sent += (sent := costs.get("bytes_sent", 0.0))
        self._last, self._last_costs = (last := self.timed(seconds, costs)), costs
        self._bytes_received += costs.get("bytes_pulled", sent)
        self._waiting += last.waiting
        self._communicating += last.wire + last.codec
        self.recent.append((last, sent))
        data = 0.0 if self._data is None else self._data.take()
        events.emit(events.StepEnded(step=self._step(), seconds=seconds, skipped=skipped, data_seconds=data, **costs))

    def stats(self, parameters: Iterable[Tensor]) -> SessionStats:
        dense = self._dense_bytes(_nbytes(parameters))
        sent = self._last_costs.get("bytes_sent", 0.0)
        received = self._last_costs.get("bytes_pulled", sent)
        seconds = StepSeconds(self._last_at - self._began_at, self._waiting, self._communicating, 0.0)
        return SessionStats(
            last_step=_stats(min(self._steps, 1), self._last, sent, received, dense),
            run=_stats(self._steps, seconds, self._bytes_sent, self._bytes_received, dense),
        )

    def text(self, parameters: Iterable[Tensor]) -> str:
        facts = self._facts(parameters)
        lines = [
            f"Session: rank {facts['rank']}, step {facts['step']}",
            f"recipe: {facts['recipe']}",
            f"sent: {facts['sent']}",
            f"record: {facts['record']}; checkpoint: {facts['checkpoint']}",
        ]
        return "\n  ".join(lines)

    def html(self, parameters: Iterable[Tensor]) -> str:
        """The same as a table, for a notebook, with the statistics of the last step and of the run."""
        parameters = list(parameters)
        stats = self.stats(parameters)
        statistics = {"last step": str(stats.last_step), "run": str(stats.run)}
        return html_table((self._facts(parameters) | statistics).items())

    def _facts(self, parameters: Iterable[Tensor]) -> dict[str, str]:
        return {
            "rank": f"{self._rank} of {self._world}",
            "step": str(self._step()),
            "recipe": repr(self.recipe),
            "sent": ", ".join(self._traffic(_nbytes(parameters))),
            "record": self.record or "none",
            "checkpoint": self.checkpoint or "none yet",
        }

    def _traffic(self, gradient_bytes: int) -> Iterator[str]:
        dense = self._dense_bytes(gradient_bytes)
        if self._world == 1:
            yield "nothing, as a world of one"
        elif not self._steps:
            yield f"nothing yet; Dense() sends {bytes_text(dense)} a step"
        else:
            sent = self._bytes_sent / self._steps
            yield f"{bytes_text(sent)} a step"
            if sent:
                yield _compared(sent, dense)

    def _dense_bytes(self, gradient_bytes: int) -> float:
        """Sent by an all-reduce in every step."""
        return 2 * (self._world - 1) / self._world * gradient_bytes


def _nbytes(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def _stats(steps: int, took: StepSeconds, sent: float, received: float, dense_bytes: float) -> StepStats:
    """dense_bytes: of one step."""
    return StepStats(
        steps=steps,
        bytes_sent=sent,
        bytes_received=received,
        seconds=took.seconds,
        compute_seconds=took.computing,
        wait_seconds=took.waiting,
        communication_seconds=took.wire + took.codec,
        compression_ratio=steps * dense_bytes / sent if sent else None,
    )


def step_seconds(seconds: float, costs: StepCosts) -> StepSeconds:
    """Divide a step's seconds into phases."""
    codec = costs.get("encode_seconds", 0.0) + costs.get("decode_seconds", 0.0)
    return StepSeconds(seconds, costs.get("waiting_seconds", 0.0), costs.get("wire_seconds", 0.0), codec)


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
        forward = model.register_forward_pre_hook(ForwardHook(self._forward))
        return forward, optimizer.register_step_post_hook(uncompiled(self.begin))

    def begin(self, *_: object) -> None:
        """Called when the loop continues to its next batch, also as a hook of the optimizer's step."""
        self._since = self._clock()

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _forward(self, model: nn.Module, inputs: Any) -> None:
        if self._since is not None and not torch.compiler.is_compiling():
            self._seconds += self._clock() - self._since
            self._since = None
