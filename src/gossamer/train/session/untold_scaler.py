"""Untold scaler: finds a GradScaler that attach was not given, before it first acts on the optimizer's gradients.

The first step of nearly every float16 run overflows. Where ranks skip a step there is no gradient, so that optimizers
do nothing, and a GradScaler refuses to find none: it learns from infinite ones that the scale is too large. It has no
hooks, so `unscale_` and `step` are wrapped on torch's class while a session does not know of one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any

import torch
from torch.amp import GradScaler
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import AveragingStage, GossipStage, GradientStage, SilentStage, Stage
from gossamer.errors import LoopError
from gossamer.train.engine.bucket import Bucket

Watcher = Callable[[Any, Optimizer], bool]

_lock = threading.Lock()
_watchers: tuple[weakref.WeakMethod[Watcher], ...] = ()  # replaced, never changed: other threads' scalers read it
_plain: Mapping[str, Any] = {name: vars(GradScaler)[name] for name in ("unscale_", "step")}


class ScalerWatch:
    """Calls `found`, a bound method that is held weakly, before a GradScaler in use acts on any optimizer's gradients.

    Where it returns true, the scaler's method is looked up anew, since it may be wrapped by now.
    """

    def __init__(self, found: Watcher) -> None:
        self._watcher = weakref.WeakMethod(found)
        with _lock:
            _keep(self._watcher)

    def remove(self) -> None:
        with _lock:
            _keep(without=self._watcher)


def _keep(*more: weakref.WeakMethod[Watcher], without: weakref.WeakMethod[Watcher] | None = None) -> None:
    global _watchers
    _watchers = (*(each for each in _watchers if each is not without and each() is not None), *more)
    for name, plain in _plain.items():
        setattr(GradScaler, name, _watched(name) if _watchers else plain)


def _watched(name: str) -> Any:
    plain = _plain[name]

    @wraps(plain)
    def method(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        told = [watcher(scaler, optimizer) for each in _watchers if (watcher := each()) and scaler.is_enabled()]
        if any(told):
            return getattr(scaler, name)(optimizer, *args, **kwargs)
        return plain(scaler, optimizer, *args, **kwargs)

    return method


def refuse_late(recipe: Recipe, stage: Stage, buckets: Iterable[Bucket]) -> None:
    """Raise LoopError where something is remembered, or under way, with the loss scale in it."""
    match stage:
        case GradientStage(delay=0, accumulates=False) if not any(bucket.state for bucket in buckets):
            return
        case AveragingStage() | SilentStage():
            return
        case GossipStage(strategy=strategy) if strategy.in_lock_step:
            return
    raise LoopError(
        f"a GradScaler scales the loss, and gossamer.attach was not told: what {recipe} keeps of gradients has a scale "
        "in it that changes, and would be added to gradients of another one. Write "
        "gossamer.attach(model, optimizer, recipe, scaler=scaler)."
    )


def show_overflow(parameters: Iterable[Parameter]) -> None:
    """Where a skipped step has left no gradient, make all infinite: a GradScaler then skips it on every rank alike."""
    shown = list(parameters)
    if all(parameter.grad is None for parameter in shown):
        for parameter in shown:
            parameter.grad = torch.full_like(parameter, torch.inf)
