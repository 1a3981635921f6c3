"""Autograd hooks: autograd as a source of gradients; reports each gradient and the end of a backward pass."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from gossamer.base.kernels import all_finite
from gossamer.base.spans import active
from gossamer.base.torch_hooks import uncompiled
from gossamer.errors import LoopError
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.sparse_gradients import entries


class OutermostBackward:
    """Calls `began` at the first gradient of a backward pass, and `over` at the end of that pass.

    Reentrant activation checkpointing runs a nested backward pass for every segment. Its end is not the end of the
    outer pass, and callbacks for the outer pass cannot be queued from within it. If the first gradient arrives in a
    nested pass, hooks on the next nodes of the outer graph queue the callback.
    """

    def __init__(self, began: Callable[[], None], over: Callable[[], None]) -> None:
        self._began, self._over, self._pid = began, over, os.getpid()
        self.task: int | None = None  # the graph task of the last gradient
        self._pass: weakref.ref[_Pass] | None = None  # weak: after a failed pass the engine drops the object

    def enter(self) -> bool:
        """Called for a gradient of another graph task than `task`. Does nothing in a forked child and returns False."""
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
                node.register_prehook(uncompiled(partial(self._outside, now)))
                for node, _ in outer.next_functions
                if node is not None
            ]
        return True

    def _outside(self, now: _Pass, _: object) -> None:
        """Called when the outer graph continues after the function in which the first gradient arrived."""
        self._await_end(now)

    def _await_end(self, now: _Pass) -> None:
        """Queue the callback for the end of the pass. Called in the outermost graph task."""
        for hook in now.hooks:
            hook.remove()
        if not now.awaits_end:
            now.awaits_end = True
            torch.autograd.Variable._execution_engine.queue_callback(uncompiled(partial(self._end, now)))

    def _end(self, now: _Pass) -> None:
        if self._pass is not None and self._pass() is now:
            self.task = self._pass = None
            if active.recorder is not None:
                active.recorder.backward_ended()
            self._over()


@dataclass(eq=False)
class _Pass:
    """An outermost backward pass, first seen in the graph task `first_task`."""

    first_task: int
    awaits_end: bool = False
    hooks: list[RemovableHandle] = field(default_factory=list)

    def holds(self, task: int) -> bool:
        """Whether a graph task belongs to this pass, if no enclosing function is known: a nested task on another
        device's thread, or the outermost task, which is older than nested ones."""
        return self.awaits_end or task < self.first_task


def outermost_function() -> Node | None:
    """The outermost autograd function on the call stack that runs a backward pass in its backward; None without one."""
    found: Node | None = None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            found = frame.f_locals["self"]
        frame = frame.f_back
    return found


@dataclass
class LoopControls:
    """Settings of the training loop for its backward passes."""

    weight: float = 1.0  # of this rank's batch
    muted: bool = False  # accumulate gradients and send nothing


def _nothing() -> None:
    """Default callback."""


class BackwardMonitor(OutermostBackward):
    """Autograd as a source of gradients. Calls `began` at the first gradient of a backward pass that reaches some of
    `parameters`, `ready` at each gradient, and `over` at the end of the pass; nothing while `controls` are muted.
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
        hook = uncompiled(self._entered if ready is None else self._arrived)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(hook, name)) for name, parameter in parameters.items()
        ]

    def _entered(self, name: str, parameter: Tensor) -> None:
        """Runs once per parameter, so it must be cheap."""
        if not self._controls.muted and torch._C._current_graph_task_id() != self.task:
            self.enter()

    def _arrived(self, name: str, parameter: Tensor) -> None:
        """Runs once per parameter, so it must be cheap."""
        if self._controls.muted or (torch._C._current_graph_task_id() != self.task and not self.enter()):
            return
        assert self._ready is not None
        self._ready(name, parameter)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def nonfinite_gradient(buckets: Iterable[Bucket]) -> str | None:
    """The name of a gradient that is not finite, or None."""
    for bucket in buckets:
        for name, parameter in bucket.parameters.items():
            if parameter.grad is not None and not all_finite(entries(parameter.grad)):
                return name
    return None


def drop_gradients(buckets: Iterable[Bucket]) -> None:
    """Remove all gradients, so that the optimizer skips the parameters."""
    for bucket in buckets:
        for parameter in bucket.parameters.values():
            parameter.grad = None


# -- CUDA graphs, which replay kernels without calling hooks -----------------------------------------------------------


def refuse_capture(what: str) -> None:
    """Raise LoopError if `what`, a hook of a session, runs while the current stream records a CUDA graph. Does not
    synchronize, nor initialize CUDA."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise LoopError(
            f"a CUDA graph is captured around {what}, which communicates with the other workers: a replay calls no "
            "hooks, so later steps would not be synchronized. Capture forward and backward without their hooks: "
            "model = torch.cuda.make_graphed_callables(model, (inputs,)) before gossamer.attach(model, optimizer), or "
            'torch.compile(model, mode="reduce-overhead"); and keep loss.backward() and optimizer.step() outside of '
            "torch.cuda.graph(...)."
        )
