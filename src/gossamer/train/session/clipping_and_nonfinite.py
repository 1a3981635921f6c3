"""Gradient guards: clips averaged gradients, and ends a run if its gradients stay non-finite."""

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

MAX_SKIPPED_STEPS = 5  # in a row, without a GradScaler, which may skip more steps to find its scale


TotalNorm = Callable[[Sequence[Parameter]], Tensor]


class StepGuards(NamedTuple):
    """Arguments of attach that guard steps."""

    scaler: Scaler | None = None
    clip_norm: float | None = None
    total_norm: TotalNorm | None = None  # of all gradients, if other ranks hold other parts of the model


class GradientClip(Extension):
    """Scales all gradients together to a norm of at most `norm`, before the first optimizer uses them.

    Args:
        norm: None disables clipping.
        scale: returns the loss scale of the GradScaler, or None.
        total: computes the norm of all gradients together, if other ranks hold other parts of the model.
    """

    order = 2

    def __init__(
        self, norm: float | None, scale: Callable[[], float | None] = lambda: None, total: TotalNorm | None = None
    ) -> None:
        require(
            norm is None or (number_in(norm) or 0) > 0,
            f"clip_norm must be positive, got {norm!r}. Example: attach(..., clip_norm=1.0)",
        )
        self.norm, self._scale, self._total = norm, scale, total or _total_norm
        self._clipped: list[tuple[weakref.ref[Tensor], int]] = []  # clipped gradients and their versions

    def before_step(self, use: GradientUse) -> None:
        """Clip gradients, once: those clipped for one optimizer are not clipped again for another, even if zero_grad()
        of the first one has removed some of them. Raises LoopError with a closure, or for gradients in two scales.
        """
        assert self.norm is not None
        if use.closure:
            raise LoopError(
                "clip_norm is applied before the optimizer's step, but a closure computes gradients within it. Clip in "
                "the closure: torch.nn.utils.clip_grad_norm_(model.parameters(), ...)."
            )
        graded = [parameter for parameter in use.parameters.values() if parameter.grad is not None]
        if self._has_clipped(graded):
            return
        if self._scale() not in (None, 1.0):
            _refuse_two_scales(use.optimizer, graded)
        left_in = getattr(use.optimizer, "grad_scale", None)  # set by a GradScaler for fused optimizers to divide by
        _clip(graded, self.norm, self._total if left_in is None else lambda each: self._total(each) / left_in)
        self._clipped = [(weakref.ref(p.grad), p.grad._version) for p in graded if p.grad is not None]

    def _has_clipped(self, graded: Iterable[Parameter]) -> bool:
        """Whether all gradients are unchanged since clipping. A new pass modifies or replaces them."""
        known = {id(gradient): version for reference, version in self._clipped if (gradient := reference()) is not None}
        return bool(known) and all(p.grad is not None and known.get(id(p.grad)) == p.grad._version for p in graded)


class _Graded(NamedTuple):
    """A gradient in the form that torch's clipping accepts."""

    grad: Tensor


def _clip(graded: Sequence[Parameter], norm: float, total: TotalNorm) -> None:
    """As nn.utils.clip_grad_norm_, with support for sparse gradients: their coalesced rows are clipped."""
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
    """Refuse gradients in two scales: a GradScaler unscales those of one optimizer, right before its step."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not {id(parameter) for parameter in graded} <= held:
        raise LoopError(
            f"clip_norm clips all gradients together, but those that {type(optimizer).__name__} does not hold may "
            "still be scaled, so their norm would be wrong. Leave clip_norm out and write, for every "
            "optimizer, scaler.unscale_(optimizer), then torch.nn.utils.clip_grad_norm_(model.parameters(), "
            "...), before the first scaler.step(...)."
        )


class NonFiniteMonitor:
    """Reports the rank and tensor of non-finite values, and ends the run if they persist. Counts by kind of event."""

    remedy = (
        "Lower the learning rate, clip gradients, for instance with attach(..., clip_norm=1.0), or, with float16, "
        "train with a GradScaler and attach(..., scaler=scaler)."
    )

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}  # by "exchange" or "pass"
        self.is_clear = True  # whether all values were finite last time

    def judge(
        self, what: str, blame: tuple[int | None, str] | None, step: int, *, scaled: bool, batch: int | None = None
    ) -> None:
        """Record the result of an exchange or pass.

        Args:
            what: the kind of exchange or pass; its results in a row are counted.
            blame: (rank, tensor) with a non-finite value; no rank if only the mean was not finite; None if all were.
            scaled: whether a GradScaler may still find its scale.
            batch: number of the batch, if this rank knows it.

        Raises:
            NonFiniteError: not `scaled`, and MAX_SKIPPED_STEPS results in a row had a non-finite value.
        """
        self._in_a_row[what] = 0 if blame is None else self._in_a_row.get(what, 0) + 1
        self.is_clear = not any(self._in_a_row.values())
        if blame is None:
            return
        rank, tensor = blame
        emit(Skipped(step=step, rank=rank, tensor=tensor, scaled=scaled, batch=batch))
        if self._in_a_row[what] >= MAX_SKIPPED_STEPS and not scaled:
            raise self._never_finite(self._in_a_row[what], rank, tensor, batch)

    def _never_finite(self, steps: int, rank: int | None, tensor: str, batch: int | None) -> NonFiniteError:
        where = "after averaging" if rank is None else f"on rank {rank}"
        where += "" if batch is None else f" in batch {batch} of its epoch"
        return NonFiniteError(
            f'values were not finite {steps} steps in a row, the last time those of "{tensor}" {where}. They were not '
            f"used, so no step was made in the meantime. {self.remedy}"
        )
