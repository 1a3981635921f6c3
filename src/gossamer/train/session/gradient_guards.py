"""Gradient guards: clips averaged gradients, and ends a run whose numbers stay non-finite."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.errors import LoopError, NonFiniteError, require
from gossamer.events import Skipped, emit
from gossamer.train.engine.extension import Extension, GradientUse
from gossamer.train.engine.sparse_gradients import entries
from gossamer.train.session.loop_scaler import Scaler
from gossamer.train.session.scalars import number_in

MAX_SKIPPED_STEPS = 5  # in a row, without a GradScaler, which needs more to find its scale


TotalNorm = Callable[[Sequence[Parameter]], Tensor]


class StepGuards(NamedTuple):
    """What attach was given to guard steps with."""

    scaler: Scaler | None = None
    clip_norm: float | None = None
    total_norm: TotalNorm | None = None  # of all gradients, where other ranks hold other parts of the model


class GradientClip(Extension):
    """Scales all gradients together to a norm of at most `norm`, before the first optimizer uses them, whichever it is.

    norm: None leaves them as they are. scale: of a GradScaler, if any, in the gradients. total: of gradients, the norm
    of all together, where other ranks hold other parts of the model.
    """

    order = 2

    def __init__(
        self, norm: float | None, scale: Callable[[], float | None] = lambda: None, total: TotalNorm | None = None
    ) -> None:
        require(
            norm is None or (number_in(norm) or 0) > 0,
            f"clip_norm is a positive norm, not {norm!r}: attach(..., clip_norm=1.0), or leave it out",
        )
        self.norm, self._scale, self._total = norm, scale, total or _total_norm
        self._clipped: list[tuple[weakref.ref[Tensor], int]] = []  # gradients and their versions as they were left

    def before_step(self, use: GradientUse) -> None:
        """Gradients that were clipped for one optimizer are not clipped again for another, also where zero_grad() of
        the first one has removed some of them. Raises LoopError where gradients are not to be had, or in two scales.
        """
        assert self.norm is not None
        if use.closure:
            raise LoopError(
                "clip_norm is applied before the optimizer's step, and a closure computes gradients within it. Clip in "
                "the closure: torch.nn.utils.clip_grad_norm_(model.parameters(), ...)."
            )
        graded = [parameter for parameter in use.parameters.values() if parameter.grad is not None]
        if self._has_clipped(graded):
            return
        if self._scale() not in (None, 1.0):
            _refuse_two_scales(use.optimizer, graded)
        left_in = getattr(use.optimizer, "grad_scale", None)  # by a GradScaler, for fused optimizers to take out
        _clip(graded, self.norm, self._total if left_in is None else lambda each: self._total(each) / left_in)
        self._clipped = [(weakref.ref(p.grad), p.grad._version) for p in graded if p.grad is not None]

    def _has_clipped(self, graded: Iterable[Parameter]) -> bool:
        """Whether all gradients are there as clipping left them. A new pass writes to them, or makes others."""
        known = {id(gradient): version for reference, version in self._clipped if (gradient := reference()) is not None}
        return bool(known) and all(p.grad is not None and known.get(id(p.grad)) == p.grad._version for p in graded)


class _Graded(NamedTuple):
    """What torch's clipping needs of a parameter."""

    grad: Tensor


def _clip(graded: Sequence[Parameter], norm: float, total: TotalNorm) -> None:
    """As nn.utils.clip_grad_norm_, which knows no sparse gradients: theirs are clipped in their rows, once summed."""
    for parameter in graded:
        assert parameter.grad is not None
        if parameter.grad.is_sparse and not parameter.grad.is_coalesced():
            parameter.grad = parameter.grad.coalesce()
    nn.utils.clip_grads_with_norm_(_rows(graded), norm, total(graded))


def _rows(graded: Iterable[Parameter]) -> list[Any]:
    return [_Graded(entries(parameter.grad)) for parameter in graded if parameter.grad is not None]


def _total_norm(graded: Iterable[Parameter]) -> Tensor:
    return nn.utils.get_total_norm([each.grad for each in _rows(graded)])


def _refuse_two_scales(optimizer: Optimizer, graded: Iterable[Parameter]) -> None:
    """A GradScaler takes the scale out of one optimizer's gradients at a time, right before its step."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not {id(parameter) for parameter in graded} <= held:
        raise LoopError(
            f"clip_norm clips all gradients together, and those that {type(optimizer).__name__} does not hold may have "
            "the loss scale in them still, so their norm would mean nothing. Leave clip_norm out and write, for every "
            "optimizer, scaler.unscale_(optimizer), then torch.nn.utils.clip_grad_norm_(model.parameters(), "
            "...), before the first scaler.step(...)."
        )


class NonFiniteMonitor:
    """Reports the rank and tensor of non-finite numbers, and ends the run where they stay. Counts by kind of event."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}  # by "exchange" or "pass"
        self.is_clear = True  # all were finite the last time

    def judge(
        self, what: str, blame: tuple[int | None, str] | None, step: int, *, scaled: bool, batch: int | None = None
    ) -> None:
        """blame: (rank, tensor) where it was not; no rank where only the mean was not. scaled: a GradScaler may still
        find its scale. batch: the number of the batch that it came from, where this rank knows it."""
        self._in_a_row[what] = 0 if blame is None else self._in_a_row.get(what, 0) + 1
        self.is_clear = not any(self._in_a_row.values())
        if blame is None:
            return
        rank, tensor = blame
        emit(Skipped(step=step, rank=rank, tensor=tensor, scaled=scaled, batch=batch))
        if self._in_a_row[what] >= MAX_SKIPPED_STEPS and not scaled:
            raise never_finite(self._in_a_row[what], rank, tensor, batch)


def never_finite(steps: int, rank: int | None, tensor: str, batch: int | None = None) -> NonFiniteError:
    where = "after averaging" if rank is None else f"on rank {rank}"
    where += "" if batch is None else f" in batch {batch} of its epoch"
    return NonFiniteError(
        f'numbers were not finite {steps} steps in a row, the last time those of "{tensor}" {where}. They were used by '
        "nobody, so nothing was learnt there meanwhile. Lower the learning rate, clip gradients, for instance with "
        "attach(..., clip_norm=1.0), or, with float16, train with a GradScaler and attach(..., scaler=scaler)."
    )
