"""Data wait: how long the loop takes from the optimizer's step to the next forward pass, mostly for its data."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


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
