"""Loop scaler: finds the training loop's GradScaler, passed to attach or detected when it acts on averaged gradients.

A GradScaler has no hooks, and it calls the optimizer only if all gradients are finite. Therefore, the method `step` of
a known scaler object is wrapped, as torch's schedulers wrap an optimizer's, and restored at the end.

The first step of nearly every float16 run overflows. When ranks skip a step, there are no gradients, so that optimizers
do nothing; but a GradScaler raises an error without gradients, and needs infinite ones to reduce its scale. Therefore,
`unscale_` and `step` of torch's class are wrapped while a session does not have a scaler.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, Protocol, Self

import torch
from torch.amp import GradScaler
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import AveragingStage, GossipStage, GradientStage, SilentStage, Stage
from gossamer.base.torch_hooks import uncompiled
from gossamer.errors import AttachError, LoopError
from gossamer.events import notice
from gossamer.train.checkpoint.state import Stateful
from gossamer.train.engine.bucket import Bucket


class Scaler(Stateful, Protocol):
    """The methods of torch.amp.GradScaler that a session uses."""

    def get_scale(self) -> float: ...
    def is_enabled(self) -> bool: ...
    def step(self, optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> Any: ...


def within_wrapper(optimizer: object) -> Scaler | None:
    """The GradScaler of an optimizer wrapper, such as AcceleratedOptimizer; None without one."""
    found = getattr(optimizer, "scaler", None)
    return found if isinstance(found, torch.amp.GradScaler) else None


NOT_RESTORED = (
    "the checkpoint has the state of a GradScaler, but the loop's scaler was not passed to gossamer.attach and was in "
    "use before the load, so its loss scale was not restored. Write gossamer.attach(..., scaler=scaler) before "
    "session.load()"
)


OTHER_RESTORED = (
    "the loop has several GradScalers, and the checkpoint's loss scale was given to another one than that of the "
    "attached optimizer: both scale losses of the same parameters. Pass the one of this optimizer before "
    "session.load(): gossamer.attach(..., scaler=scaler)"
)

_restored: weakref.WeakSet[Scaler] = weakref.WeakSet()  # scalers with a loaded state, which sessions may share


def _may_train(outputs: object, optimizer: Optimizer) -> bool:
    """Whether the graph of these outputs reaches a parameter of the optimizer, or no parameter at all, as under
    activation checkpointing."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    several = outputs if isinstance(outputs, list | tuple) else [outputs]
    waiting, seen, others = [getattr(each, "grad_fn", None) for each in several], set[object](), False
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if id(variable) in own:
            return True
        others = others or isinstance(variable, Parameter)
        waiting += [each for each, _ in node.next_functions]
    return not others


class LoopScaler:
    """Provides the scale of the gradients, and calls `skipped` after steps of `optimizer` that the scaler skips.

    Its state in checkpoints is that of the scaler. If the scaler is not known when a state is loaded, the next unused
    GradScaler that scales an output of the optimizer's parameters on this thread takes the state.

    take_up: called with an optimizer before another scaler acts on its gradients. Returns whether these are averaged,
        so that it is the loop's scaler.
    """

    def __init__(
        self,
        scaler: Scaler | None,
        optimizer: Optimizer,
        skipped: Callable[[], None],
        take_up: Callable[[Optimizer], bool],
    ) -> None:
        self.scaler = scaler
        self._optimizer, self._skipped, self._take_up = optimizer, skipped, take_up
        self._hook: SkippedStepHook | ScalerWatch | None = None
        self._loaded: dict[str, Any] = {}  # state for a scaler that is not known yet
        self._restored: Scaler | None = None  # the scaler that took it
        self._restores: ScalerWatch | None = None
        self._thread, self._gives_notice = threading.get_ident(), False

    def install(self, *, gives_notice: bool) -> Self:
        """Install hooks; without a scaler also those that detect it. gives_notice: whether this rank prints notices."""
        self._gives_notice = gives_notice
        if self.scaler is not None:
            self._hook = SkippedStepHook(self.scaler, self._optimizer, self._skipped)
        else:
            self._hook = ScalerWatch(self._found)
        return self

    def _found(self, scaler: Scaler, optimizer: Optimizer) -> bool:
        if self.scaler is not None or not self._take_up(optimizer):
            return False
        if self._loaded and self._restored is not None and scaler is not self._restored:
            raise LoopError(OTHER_RESTORED)
        if self._loaded and scaler not in _restored and self._gives_notice:
            notice(NOT_RESTORED)
        self.remove()
        self.scaler, self._loaded = scaler, {}
        self.install(gives_notice=self._gives_notice)
        return True

    def state_dict(self) -> dict[str, Any]:
        return dict(self._loaded) if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        if state and self.scaler is not None:
            self.scaler.load_state_dict(state)
        elif state:
            self._loaded, self._restored = state, None
            if self._restores is not None:
                self._restores.remove()
            self._restores = ScalerWatch(self._restore, ("scale",))

    def _restore(self, scaler: Scaler, outputs: object) -> bool:
        """A scaler is about to scale outputs."""
        unused = getattr(scaler, "_scale", None) is None and self._restored is None
        if unused and threading.get_ident() == self._thread and _may_train(outputs, self._optimizer):
            scaler.load_state_dict(self._loaded)
            self._restored = scaler
            _restored.add(scaler)
        return False

    def scale(self) -> float | None:
        """The loss scale; None without a scaler, or with a disabled one."""
        return None if self.scaler is None or not self.scaler.is_enabled() else self.scaler.get_scale()

    def remove(self) -> None:
        for hook in (self._hook, self._restores):
            if hook is not None:
                hook.remove()
        self._hook = self._restores = None


# -- steps that the scaler skips ---------------------------------------------------------------------------------------


class SkippedStepHook:
    """Calls `skipped`, a weakly referenced bound method, if scaler.step(optimizer) has not stepped `optimizer`."""

    def __init__(self, scaler: Scaler, optimizer: Optimizer, skipped: Callable[[], None]) -> None:
        self._scaler, self._stepped, self._removed = scaler, False, False
        self._handle = optimizer.register_step_post_hook(uncompiled(self._see))
        inner, bound_watcher, attached = scaler.step, weakref.WeakMethod(skipped), weakref.ref(optimizer)

        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._stepped = False
            result = inner(optimizer, *args, **kwargs)
            left_out = optimizer is attached() and not self._stepped and not self._removed
            if left_out and (bound := bound_watcher()) is not None:
                bound()
            return result

        self._inner, self._step = inner, step
        scaler.step = step  # type: ignore[method-assign]

    def _see(self, *_: Any) -> None:
        self._stepped = True

    def remove(self) -> None:
        """Restore the scaler's own method, unless it was wrapped again in the meantime."""
        self._removed = True
        self._handle.remove()
        if vars(self._scaler).get("step") is self._step:
            self._scaler.step = self._inner  # type: ignore[method-assign]


# -- a scaler that was not passed to attach ----------------------------------------------------------------------------

Watcher = Callable[[Any, Any], bool]  # called with a scaler and the first argument of its method
Kept = tuple[weakref.WeakMethod[Watcher], tuple[str, ...]]

_lock = threading.Lock()
_watchers: tuple[Kept, ...] = ()  # replaced, never modified: scalers on other threads read it
_plain: Mapping[str, Any] = {name: vars(GradScaler)[name] for name in ("scale", "unscale_", "step")}


class ScalerWatch:
    """Calls `found`, a weakly referenced bound method, before methods of any GradScaler in use: by default, before it
    acts on an optimizer's gradients.

    If it returns True, the scaler's method is looked up again, since it may be wrapped now.
    """

    def __init__(self, found: Watcher, methods: tuple[str, ...] = ("unscale_", "step")) -> None:
        self._watcher = weakref.WeakMethod(found), methods
        with _lock:
            _keep(self._watcher)

    def remove(self) -> None:
        with _lock:
            _keep(without=self._watcher)


def _keep(*more: Kept, without: Kept | None = None) -> None:
    global _watchers
    _watchers = (*(each for each in _watchers if each is not without and each[0]() is not None), *more)
    for name, plain in _plain.items():
        setattr(GradScaler, name, _watched(name) if any(name in methods for _, methods in _watchers) else plain)


def _watched(name: str) -> Any:
    plain = _plain[name]

    @wraps(plain)
    def method(scaler: GradScaler, given: Any, *args: Any, **kwargs: Any) -> Any:
        called = [watcher() for watcher, methods in _watchers if name in methods and scaler.is_enabled()]
        taken_up = [found(scaler, given) for found in called if found is not None]
        if any(taken_up):
            return getattr(scaler, name)(given, *args, **kwargs)
        return plain(scaler, given, *args, **kwargs)

    return method


def scaler_of_parts() -> AttachError:
    return AttachError(
        "a GradScaler skips a step according to the gradients on this rank, but with mesh= other ranks hold other "
        "parts of the model, so only some would skip it. Train in bfloat16 without one: fully_shard(..., "
        "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), or torch.autocast."
    )


def refuse_late(recipe: Recipe, stage: Stage, buckets: Iterable[Bucket]) -> None:
    """Raise LoopError if compressor state, or gradients in flight, include the loss scale."""
    match stage:
        case GradientStage(delay=0, accumulates=False) if not any(bucket.state for bucket in buckets):
            return
        case AveragingStage() | SilentStage():
            return
        case GossipStage(strategy=strategy) if strategy.in_lock_step:
            return
    raise LoopError(
        f"a GradScaler scales the loss, but was not passed to gossamer.attach: the state of {recipe} includes a scale "
        "that changes, and would be added to gradients with another scale. Write "
        "gossamer.attach(model, optimizer, recipe, scaler=scaler)."
    )


def show_overflow(parameters: Iterable[Parameter]) -> None:
    """After a skipped step without gradients, set infinite ones, so that a GradScaler skips it on every rank."""
    shown = list(parameters)
    if all(parameter.grad is None for parameter in shown):
        for parameter in shown:
            parameter.grad = torch.full_like(parameter, torch.inf)
