"""Extensions: features of one session that act in its steps. A feature that is off is not registered, nor called.

order of a step                                    examples
pass_began       a pass, a step or an epoch begins     preemption, the end of training, models that were cast
before_exchange  parameters are about to be exchanged  checks of the model, gradients of DTensors
before_step      an optimizer uses the mean gradients  gradients still owed, clipping
after_step       the optimizer has made its step       changes of an elastic group
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch.nn import Parameter
from torch.optim import Optimizer


class GradientUse(NamedTuple):
    """An optimizer that is about to use mean gradients: the attached one, or another one of the same parameters."""

    optimizer: Optimizer
    parameters: Mapping[str, Parameter]  # all attached ones, by name
    closure: bool  # the step has one, which computes gradients of its own
    attached: bool = True  # it is the attached one


class Extension:
    """Base class of features. Only the methods that a subclass defines are called, in ascending order of `order`."""

    order = 0

    def pass_began(self) -> None:
        """A backward pass whose gradients travel, a step of the optimizer or an epoch begins; may raise."""

    def before_exchange(self, steps: int) -> None:
        """The synchronizer's `before_step` follows. steps: that were made so far."""

    def before_step(self, use: GradientUse) -> None:
        """Gradients are as the synchronizer leaves them."""

    def after_step(self) -> None:
        """The synchronizer's `after_step` has returned; a next stage of the recipe has not begun."""


class Extensions:
    """The extensions of one session that are on, by moment. The tuples are replaced and never changed, so an extension
    may remove itself while it is called."""

    def __init__(self) -> None:
        self._on: list[Extension] = []
        self._list()

    def add(self, extension: Extension) -> None:
        """Call `extension` from now on. Idempotent."""
        if extension not in self._on:
            self._on = sorted([*self._on, extension], key=lambda each: each.order)
            self._list()

    def discard(self, extension: Extension) -> None:
        """Call it no longer. Idempotent."""
        self._on = [each for each in self._on if each is not extension]
        self._list()

    def _list(self) -> None:
        on = self._on
        self.pass_began = tuple(each.pass_began for each in on if _defines(each, Extension.pass_began))
        self.before_exchange = tuple(each.before_exchange for each in on if _defines(each, Extension.before_exchange))
        self.before_step = tuple(each.before_step for each in on if _defines(each, Extension.before_step))
        self.after_step = tuple(each.after_step for each in on if _defines(each, Extension.after_step))

    def begin_pass(self) -> None:
        for act in self.pass_began:
            act()


def _defines(extension: Extension, moment: Callable[..., None]) -> bool:
    """Whether the class of `extension` defines a moment itself."""
    return getattr(type(extension), moment.__name__) is not moment
