"""Scaler hook: hears of optimizer steps that a GradScaler leaves out.

A GradScaler calls the optimizer only where it has found no gradient that is not finite, and has no hooks. So its method
`step` is wrapped on this one object, as torch's schedulers wrap an optimizer's, and unwrapped at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from gossamer.train.session.gradient_guards import Scaler


class SkippedStepHook:
    """Calls `skipped`, a bound method that is held weakly, after scaler.step(optimizer) has not stepped `optimizer`."""

    def __init__(self, scaler: Scaler, optimizer: Optimizer, skipped: Callable[[], None]) -> None:
        self._scaler, self._stepped, self._removed = scaler, False, False
        self._handle = optimizer.register_step_post_hook(self._see)
        inner, told, attached = scaler.step, weakref.WeakMethod(skipped), weakref.ref(optimizer)

        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._stepped = False
            result = inner(optimizer, *args, **kwargs)
            left_out = optimizer is attached() and not self._stepped and not self._removed
            if left_out and (tell := told()) is not None:
                tell()
            return result

        self._inner, self._step = inner, step
        scaler.step = step  # type: ignore[method-assign]

    def _see(self, *_: Any) -> None:
        self._stepped = True

    def remove(self) -> None:
        """Give the scaler its own method back, unless somebody else has wrapped it meanwhile."""
        self._removed = True
        self._handle.remove()
        if vars(self._scaler).get("step") is self._step:
            self._scaler.step = self._inner  # type: ignore[method-assign]
