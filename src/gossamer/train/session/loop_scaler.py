"""Loop scaler: finds the training loop's GradScaler, given to attach or as it first acts on averaged gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Self

from torch.optim import Optimizer

from gossamer.train.checkpoint.state import Stateful
from gossamer.train.session.gradient_guards import Scaler
from gossamer.train.session.scaler_hook import SkippedStepHook
from gossamer.train.session.untold_scaler import ScalerWatch


class LoopScaler:
    """Knows the scale in the gradients, and calls `skipped` after steps of `optimizer` that the scaler leaves out.

    take_up: called with an optimizer whose gradients another scaler is about to act on; returns whether these are
    averaged, so that it is the loop's.
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

    def install(self, *, watches: bool) -> Self:
        """watches: also for a scaler that attach was not given."""
        if self.scaler is not None:
            self._hook = SkippedStepHook(self.scaler, self._optimizer, self._skipped)
        elif watches:
            self._hook = ScalerWatch(self._found)
        return self

    def _found(self, scaler: Scaler, optimizer: Optimizer) -> bool:
        if self.scaler is not None or not self._take_up(optimizer):
            return False
        self.remove()
        self.scaler = scaler
        self.install(watches=False)
        return True

    def scale(self) -> float | None:
        """The factor in the gradients; None without a scaler, or with one that is switched off."""
        return None if self.scaler is None or not self.scaler.is_enabled() else self.scaler.get_scale()

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """What checkpoints hold of it, by name."""
        return {} if self.scaler is None else {"scaler": self.scaler}

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
