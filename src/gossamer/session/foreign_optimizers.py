"""Foreign optimizers: refuses steps of other optimizers in attached parameters that would differ between ranks.

One global hook runs before every optimizer's step in this process while sessions are open.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gossamer.errors import LoopError
from gossamer.moments.take_over import ownership
from gossamer.recipes.recipe import Recipe
from gossamer.runtime.worker_scope import WorkerScope, current_worker
from gossamer.session.gradient_guards import has_closure
from gossamer.strategies import GradientStage, Stage

LOCAL = "the last backward() was within session.no_sync(): each rank would make a step with gradients of its own"

Watcher = Callable[[Optimizer, bool], None]  # whether its step has a closure
_Watching = tuple[WorkerScope, weakref.WeakMethod[Watcher]]  # whose optimizers

_lock = threading.Lock()
_watchers: tuple[_Watching, ...] = ()  # replaced, never changed: steps read it in other threads
_hook: RemovableHandle | None = None


class OptimizerStepHook:
    """Calls `watcher`, a bound method that is held weakly, before every step of any optimizer of this worker."""

    def __init__(self, watcher: Watcher) -> None:
        global _hook
        self._watcher = (current_worker(), weakref.WeakMethod(watcher))
        with _lock:
            _keep(self._watcher)
            if _hook is None:
                _hook = register_optimizer_step_pre_hook(_before_any_step)

    def remove(self) -> None:
        global _hook
        with _lock:
            _keep(without=self._watcher)
            if not _watchers and _hook is not None:
                _hook.remove()
                _hook = None


def _keep(*more: _Watching, without: _Watching | None = None) -> None:
    global _watchers
    _watchers = (*(each for each in _watchers if each is not without and each[1]() is not None), *more)


def _before_any_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    for worker, each in _watchers:
        watcher = each() if worker is current_worker() else None
        if watcher is not None:
            watcher(optimizer, has_closure(args, kwargs))


class ForeignOptimizerGuard:
    """Guards the parameters of one session against other optimizers' steps.

    Gradients that are averaged in every backward pass are so for any optimizer. Averaging around the attached
    optimizer's steps does not happen around another's, and momentum that a compressor applies is the attached one's.
    """

    def __init__(
        self, model: nn.Module, attached: Optimizer, recipe: Recipe, parameters: Mapping[str, Parameter]
    ) -> None:
        self._model, self._attached = model, attached
        self._averaged = {id(parameter) for parameter in parameters.values()}
        self._frozen = {id(parameter) for parameter in model.parameters()} - self._averaged
        around = any(acts_around_steps(stage) for stage in recipe.strategy.stages)
        reserved = parameters if around else ownership(recipe.compressor, parameters)
        self._reserved = {id(parameters[name]) for name in reserved}
        self._why = (
            f"{recipe} acts around that one's steps: what this one changes would never reach the other workers"
            if around
            else f"{recipe} has put the momentum of the attached one into gradients: another's would come on top of it"
        )

    def refuse_unaveraged(self, attached: Optimizer) -> None:
        """Raise LoopError where the attached optimizer trains a parameter that is not averaged."""
        held = {id(p) for group in attached.param_groups for p in group["params"] if p.requires_grad}
        if not held <= self._averaged:
            raise LoopError(
                "the optimizer trains a parameter that was frozen, or not there, at attach, and nobody averages its "
                "gradient. Call session.close() and gossamer.attach(...) again after adding or thawing it; after "
                "resizing one, session.reset(name)."
            )

    def check(self, other: Optimizer, *, local: bool) -> None:
        """Raise LoopError where `other` is about to make a step that would not reach the other ranks, or not rightly.

        local: the gradients are those of this rank, since nothing was averaged after a backward pass in no_sync().
        """
        if other is self._attached:
            return
        held = [parameter for group in other.param_groups for parameter in group["params"]]
        if any(id(parameter) in self._reserved for parameter in held):
            self._refuse_unless_wrapped(other, self._why)
        elif local and any(id(parameter) in self._averaged for parameter in held):
            self._refuse_unless_wrapped(other, LOCAL)
        elif thawed := [p for p in held if id(p) in self._frozen and p.requires_grad and p.grad is not None]:
            self._refuse_thawed(other, thawed)

    def shares(self, other: Optimizer) -> bool:
        """Whether `other` itself changes parameters that are averaged, and not through the attached one."""
        held = (parameter for group in other.param_groups for parameter in group["params"])
        return any(id(parameter) in self._averaged for parameter in held) and not steps_through(other, self._attached)

    def _refuse_unless_wrapped(self, other: Optimizer, why: str) -> None:
        if steps_through(self._attached, other) or steps_through(other, self._attached):
            return
        raise LoopError(
            f"{type(other).__name__} is about to change parameters that are attached with another optimizer, "
            f"{type(self._attached).__name__}, and {why}. "
            "Call session.close() and gossamer.attach(model, new_optimizer, ...) before training goes on with a new "
            "one. Two at a time, such as Muon for matrices and AdamW for the rest, can share gradients that are "
            "averaged in backward(), as by EveryStep() + Dense(); else make one of both, whose step() makes theirs, "
            "and attach it: class Both in examples/muon.py."
        )

    def _refuse_thawed(self, other: Optimizer, thawed: list[Parameter]) -> None:
        if any(parameter is each for parameter in self._model.parameters() for each in thawed):  # an id may be anew
            raise LoopError(
                f"{type(other).__name__} trains a parameter that was frozen at attach, and nobody averages its "
                "gradient. Call session.close() and gossamer.attach(model, optimizer, ...) again after thawing it."
            )


def acts_around_steps(stage: Stage) -> bool:
    """Whether something other than gradients is agreed upon."""
    return not isinstance(stage, GradientStage)


def steps_through(outer: Optimizer, inner: Optimizer, depth: int = 3) -> bool:
    """Whether `outer` wraps `inner`, as SAM or Lookahead do: its steps are the inner one's."""
    return any(part is inner or (depth > 0 and steps_through(part, inner, depth - 1)) for part in _parts(outer))


def _parts(optimizer: Optimizer) -> Iterator[Optimizer]:
    for value in vars(optimizer).values():
        several = value if isinstance(value, (list, tuple)) else [value]
        yield from (each for each in several if isinstance(each, Optimizer))
