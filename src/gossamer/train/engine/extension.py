"""Extensions: features of one session that act in its steps. A feature that is off is not registered, nor called.

hook, in order   called                                examples
pass_began       before a pass, a step or an epoch     preemption, the end of training, models that were cast
before_exchange  before parameters are exchanged       checks of the model, gradients of DTensors
before_step      before mean gradients are used        adding residual gradients, clipping
after_step       after the optimizer step              changes of an elastic group
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch.nn import Parameter
from torch.optim import Optimizer


class GradientUse(NamedTuple):
    """The use of mean gradients by an optimizer: the attached one, or another one of the same parameters."""

    optimizer: Optimizer
    parameters: Mapping[str, Parameter]  # all attached ones, by name
    closure: bool  # whether the step has a closure, which computes its own gradients
    attached: bool = True  # whether it is the attached optimizer


class Extension:
    """Base class of features. Only the methods that a subclass defines are called, in ascending order of `order`."""

    order = 0

    def pass_began(self) -> None:
        """Called before a backward pass that is synchronized, an optimizer step or an epoch; may raise."""

    def before_exchange(self, steps: int) -> None:
        """Called before the synchronizer's `before_step`. steps: number of steps made."""

    def before_step(self, use: GradientUse) -> None:
        """Called after the synchronizer's `before_step`, before the optimizer uses the gradients."""

    def after_step(self) -> None:
        """Called after the synchronizer's `after_step`, before the next stage of the recipe."""


class Extensions:
    """The active extensions of one session, by hook. The tuples are replaced, never modified, so an extension may
    remove itself while it is called."""

    def __init__(self) -> None:
        self._on: list[Extension] = []
        self._list()

    def add(self, extension: Extension) -> None:
        """Call `extension` from now on. Idempotent."""
        if extension not in self._on:
            self._on = sorted([*self._on, extension], key=lambda each: each.order)
            self._list()

    def discard(self, extension: Extension) -> None:
        """Do not call `extension` any more. Idempotent."""
        self._on = [each for each in self._on if each is not extension]
        self._list()

    def _list(self) -> None:
        on = self._on
        self.pass_began = tuple(each.pass_began for each in on if _defines(each, Extension.pass_began))
        self.before_exchange = tuple(each.before_exchange for each in on if _defines(each, Extension.before_exchange))
        self.before_step = tuple(each.before_step for each in on if _defines(each, Extension.before_step))
        self.after_step = tuple(each.after_step for each in on if _defines(each, Extension.after_step))


def _defines(extension: Extension, moment: Callable[..., None]) -> bool:
    """Whether the class of `extension` overrides a hook."""
    return getattr(type(extension), moment.__name__) is not moment
