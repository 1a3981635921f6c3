"""Gradient guards: clips averaged gradients, and ends a run whose numbers stay non-finite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.checkpoint.state import Stateful
from gossamer.errors import LoopError, NonFiniteError, require
from gossamer.events import Skipped, emit

MAX_SKIPPED_STEPS = 5  # in a row, without a GradScaler, which needs more to find its scale


class Scaler(Stateful, Protocol):
    """The methods of torch.amp.GradScaler that a session uses."""

    def get_scale(self) -> float: ...
    def is_enabled(self) -> bool: ...
    def step(self, optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> Any: ...


def check_norm(norm: float | None) -> None:
    require(
        norm is None or norm > 0,
        f"clip_norm is a positive norm, not {norm}: attach(..., clip_norm=1.0), or leave it out",
    )


def clip_gradients(parameters: Iterable[Parameter], norm: float, optimizer: Optimizer, *, closure: bool) -> None:
    """Scale all gradients so that their norm together is at most `norm`, just before the optimizer uses them."""
    if closure:
        raise LoopError(
            "clip_norm is applied before the optimizer's step, and a closure computes gradients within it. Clip in the "
            "closure: torch.nn.utils.clip_grad_norm_(model.parameters(), ...)."
        )
    left_in = getattr(optimizer, "grad_scale", None)  # by a GradScaler, for fused optimizers to take out
    nn.utils.clip_grad_norm_(parameters, norm if left_in is None else norm * float(left_in))


class NonFiniteMonitor:
    """Reports the rank and tensor of non-finite numbers, and ends the run where they stay. Counts by kind of event."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}  # by "exchange" or "pass"

    def judge(self, what: str, blame: tuple[int | None, str] | None, step: int, *, scaled: bool) -> None:
        """blame: (rank, tensor) where it was not; no rank where only the mean was not. scaled: a GradScaler may still
        find its scale."""
        self._in_a_row[what] = 0 if blame is None else self._in_a_row.get(what, 0) + 1
        if blame is None:
            return
        rank, tensor = blame
        emit(Skipped(step=step, rank=rank, tensor=tensor, scaled=scaled))
        if self._in_a_row[what] >= MAX_SKIPPED_STEPS and not scaled:
            raise never_finite(self._in_a_row[what], rank, tensor)


def never_finite(steps: int, rank: int | None, tensor: str) -> NonFiniteError:
    where = "after averaging" if rank is None else f"on rank {rank}"
    return NonFiniteError(
        f'numbers were not finite {steps} steps in a row, the last time those of "{tensor}" {where}. They were used by '
        "nobody, so nothing was learnt there meanwhile. Lower the learning rate, clip gradients, for instance with "
        "attach(..., clip_norm=1.0), or, with float16, train with a GradScaler and attach(..., scaler=scaler)."
    )
