"""Torch hooks: autograd as a source of gradients, which tells when each is ready and when a backward pass is over."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from gossamer.base.kernels import all_finite
from gossamer.base.spans import active
from gossamer.errors import LoopError
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.sparse_gradients import entries


class OutermostBackward:
    """Calls `began` at the first gradient of a backward pass, and `over` when that pass is over.

    Reentrant activation checkpointing runs a backward pass within the pass for every segment: a graph task of its own,
    whose end is not the end, and from within which nothing can be queued for the outer one's. So a pass that is first
    seen from within hooks the nodes that its outer graph goes on with, and waits for the end from there.
    """

    def __init__(self, began: Callable[[], None], over: Callable[[], None]) -> None:
        self._began, self._over, self._pid = began, over, os.getpid()
        self.task: int | None = None  # the graph task whose gradients came last
        self._pass: weakref.ref[_Pass] | None = None  # only the engine keeps it: one that failed is gone

    def enter(self) -> bool:
        """A gradient of another graph task than `task` is there. Does nothing in a forked child: False."""
        if os.getpid() != self._pid:
            return False
        refuse_capture("loss.backward()")
        self.task = torch._C._current_graph_task_id()
        outer = outermost_function()
        now = None if self._pass is None else self._pass()
        if now is None or (outer is None and not now.holds(self.task)):
            now = _Pass(self.task)
            self._pass = weakref.ref(now)
            if active.recorder is not None:
                active.recorder.backward_begins()
            self._began()
        if outer is None:
            self._await_end(now)
        elif not now.hooks:
            now.hooks = [
                node.register_prehook(partial(self._outside, now))
                for node, _ in outer.next_functions
                if node is not None
            ]
        return True

    def _outside(self, now: _Pass, _: object) -> None:
        """The outer graph goes on, after the function within which a gradient was first seen."""
        self._await_end(now)

    def _await_end(self, now: _Pass) -> None:
        """Called in the outermost graph task."""
        for hook in now.hooks:
            hook.remove()
        if not now.awaits_end:
            now.awaits_end = True
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, now))

    def _end(self, now: _Pass) -> None:
        if self._pass is not None and self._pass() is now:
            self.task = self._pass = None
            if active.recorder is not None:
                active.recorder.backward_ended()
            self._over()


class _Pass:
    """An outermost backward pass, of which `first_task` was seen first."""

    def __init__(self, first_task: int) -> None:
        self._first_task = first_task
        self.awaits_end = False
        self.hooks: list[RemovableHandle] = []

    def holds(self, task: int) -> bool:
        """Whether a graph task that no function's backward is known to have begun belongs to this pass: a nested one on
        another device's thread, or the outermost one, which is older than those within it."""
        return self.awaits_end or task < self._first_task


def outermost_function() -> Node | None:
    """The autograd function of the outermost graph whose backward runs a backward pass, in which the caller is; None
    where the caller is in no such pass."""
    found: Node | None = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            found = frame.f_locals["self"]
        frame = frame.f_back
    return found


@dataclass
class LoopControls:
    """What the training loop says of its backward passes."""

    weight: float = 1.0  # of this rank's batch
    muted: bool = False  # backward passes add up and send nothing


def _nothing() -> None:
    """Nobody asked."""


class BackwardMonitor(OutermostBackward):
    """Autograd as a source of gradients: hooks call `began` at the first gradient of a backward pass that reaches some
    of `parameters`, `ready` at each of them, and `over` when the pass is over. None of them while `controls` are muted.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        over: Callable[[], None],
        began: Callable[[], None] = _nothing,
        ready: Callable[[str, Tensor], None] | None = None,
        controls: LoopControls | None = None,
    ) -> None:
        super().__init__(began, over)
        self._ready, self._controls = ready, controls or LoopControls()
        hook = self._entered if ready is None else self._arrived
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(hook, name)) for name, parameter in parameters.items()
        ]

    def _entered(self, name: str, parameter: Tensor) -> None:
        """Runs once per parameter, so it does as little as it can."""
        if not self._controls.muted and torch._C._current_graph_task_id() != self.task:
            self.enter()

    def _arrived(self, name: str, parameter: Tensor) -> None:
        """Runs once per parameter, too."""
        if self._controls.muted or (torch._C._current_graph_task_id() != self.task and not self.enter()):
            return
        assert self._ready is not None
        self._ready(name, parameter)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def nonfinite_gradient(buckets: Iterable[Bucket]) -> str | None:
    """The name of a gradient that is not finite; None where all are."""
    for bucket in buckets:
        for name, parameter in bucket.parameters.items():
            if parameter.grad is not None and not all_finite(entries(parameter.grad)):
                return name
    return None


def drop_gradients(buckets: Iterable[Bucket]) -> None:
    """Take all gradients away, so that the optimizer does nothing."""
    for bucket in buckets:
        for parameter in bucket.parameters.values():
            parameter.grad = None


# -- CUDA graphs, which would replay kernels and call no hook ----------------------------------------------------------


def is_capturing() -> bool:
    """Whether the caller's stream records a CUDA graph. Asks no GPU, and nothing where none was used."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(what: str) -> None:
    """Raise LoopError where `what`, a hook of a session, runs while a graph is recorded."""
    if is_capturing():
        raise LoopError(
            f"a CUDA graph is recorded around {what}, where gossamer talks to the other workers: a replay calls no "
            "hook, so every later step would be trained alone. Record forward and backward without their hooks: "
            "model = torch.cuda.make_graphed_callables(model, (inputs,)) before gossamer.attach(model, optimizer), or "
            'torch.compile(model, mode="reduce-overhead"); and leave loss.backward() and optimizer.step() outside of '
            "torch.cuda.graph(...)."
        )
