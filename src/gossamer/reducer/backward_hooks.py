"""Backward hooks: find out when a backward pass is over, and drop its gradients where they are not finite.

The hook of each gradient, which lets a full bucket leave during backward, is in gossamer.synchronizers.gradients.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from types import FrameType

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import CheckpointFunction

from gossamer.errors import LoopError
from gossamer.kernels import all_finite
from gossamer.reducer.bucket import Bucket


class BackwardMonitor:
    """Calls `over` whenever a backward pass has reached some of the parameters and is over."""

    def __init__(self, parameters: Iterable[Parameter], over: Callable[[], None]) -> None:
        self._over, self._pid = over, os.getpid()
        self._task: int | None = None
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._ready) for parameter in parameters]

    def _ready(self, parameter: Tensor) -> None:
        """Runs once per parameter, so it does as little as it can. Does nothing in a forked child."""
        task = torch._C._current_graph_task_id()
        if task != self._task and os.getpid() == self._pid:
            refuse_reentrant()
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._over)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def drop_nonfinite_gradients(buckets: Iterable[Bucket]) -> str | None:
    """The name of a gradient that is not finite; all are then taken away, so that the optimizer does nothing."""
    parameters = {name: parameter for bucket in buckets for name, parameter in bucket.parameters.items()}
    for name, parameter in parameters.items():
        if parameter.grad is not None and not all_finite(parameter.grad):
            for each in parameters.values():
                each.grad = None
            return name
    return None


def refuse_reentrant() -> None:
    """Reentrant checkpointing runs whole backward passes inside one: hooks fire twice and passes end in the middle."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            raise LoopError(
                "reentrant activation checkpointing runs backward passes inside the backward pass, so nobody can tell "
                "when a gradient is complete. Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )
        frame = frame.f_back
