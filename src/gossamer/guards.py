"""What a session watches for around the optimizer's step."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.checkpoint.state import Stateful
from gossamer.errors import CheckpointError, LoopError, NonFiniteError, require
from gossamer.events import Skipped, emit
from gossamer.runtime.comm_thread import Lane
from gossamer.runtime.transport import Transport

PATIENCE = 5  # steps in a row that may be skipped without a GradScaler, which needs more to find its scale


class Scaler(Stateful, Protocol):
    """What is needed of torch.amp.GradScaler."""

    def get_scale(self) -> float: ...
    def is_enabled(self) -> bool: ...


def leave(lane: Lane, transport: Transport, process: int) -> None:
    """End the lane, and leave the group before the interpreter ends; a forked child has no part in either."""
    if os.getpid() != process:
        return
    if lane.is_here:  # garbage is collected anywhere, also amid what this would close
        threading.Thread(target=leave, args=(lane, transport, process), daemon=True).start()
    else:
        lane.close()
        with suppress(RuntimeError):
            transport.close()


def check_norm(norm: float | None) -> None:
    require(
        norm is None or norm > 0,
        f"clip_norm is a positive norm, not {norm}: attach(..., clip_norm=1.0), or leave it out",
    )


def numbers(metrics: Mapping[str, float | Tensor]) -> dict[str, float]:
    """What was logged, as numbers by name. Raises TypeError for what is none."""
    return {name: _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: float | Tensor) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"session.log({name}=...) was given {_shown(value)}, and records hold numbers. Write a number or a tensor "
            f"of one entry, such as session.log({name}=loss.mean())."
        ) from None


def _shown(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def refuse_misfit(state: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Refuse a session's saved state that belongs to another run."""
    for key in ("recipe", "layout", "world", "rank"):
        if state[key] != mine[key]:
            raise CheckpointError(
                f"this checkpoint's {key} is {state[key]!r}, this session's is {mine[key]!r}: what was remembered "
                "would not fit. Run with what it was written with, or begin in an empty directory."
            )


def clip(parameters: Iterable[Parameter], norm: float, optimizer: Optimizer, *, closure: bool) -> None:
    """Scale all gradients so that their norm together is at most `norm`, just before the optimizer uses them."""
    if closure:
        raise LoopError(
            "clip_norm is applied before the optimizer's step, and a closure computes gradients within it. Clip in the "
            "closure: torch.nn.utils.clip_grad_norm_(model.parameters(), ...)."
        )
    left_in = getattr(optimizer, "grad_scale", None)  # by a GradScaler, for fused optimizers to take out
    nn.utils.clip_grad_norm_(parameters, norm if left_in is None else norm * float(left_in))


def refuse_strangers(optimizer: Optimizer, averaged: Set[int]) -> None:
    """Refuse parameters, by id, that the optimizer trains and nobody averages."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if not held <= averaged:
        raise LoopError(
            "the optimizer trains a parameter that was frozen, or not there, at attach, and nobody averages its "
            "gradient. Call session.close() and gossamer.attach(...) again after adding or thawing it; after resizing "
            "one, session.reset(name)."
        )


class Patience:
    """Says whose numbers were not finite, and ends the run where that goes on. Exchanges and passes count apart."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}

    def judge(self, what: str, blame: tuple[int | None, str] | None, step: int, *, scaled: bool) -> None:
        """blame: (rank, tensor) where it was not; no rank where only the mean was not. scaled: a GradScaler may still
        find its scale."""
        self._in_a_row[what] = 0 if blame is None else self._in_a_row.get(what, 0) + 1
        if blame is None:
            return
        rank, tensor = blame
        emit(Skipped(step=step, rank=rank, tensor=tensor, scaled=scaled))
        if self._in_a_row[what] >= PATIENCE and not scaled:
            raise never_finite(self._in_a_row[what], rank, tensor)


def never_finite(steps: int, rank: int | None, tensor: str) -> NonFiniteError:
    where = "after averaging" if rank is None else f"on rank {rank}"
    return NonFiniteError(
        f'numbers were not finite {steps} steps in a row, the last time those of "{tensor}" {where}. They were used by '
        "nobody, so nothing was learnt there meanwhile. Lower the learning rate, clip gradients, for instance with "
        "attach(..., clip_norm=1.0), or, with float16, train with a GradScaler and attach(..., scaler=scaler)."
    )


@contextmanager
def kept_gradients(parameters: Iterable[Parameter]) -> Iterator[None]:
    """Gradients that an optimizer has not used yet outlive an exchange in between."""
    kept = [(p, None if p.grad is None else p.grad.clone()) for p in parameters]
    yield
    for parameter, gradient in kept:
        parameter.grad = gradient
