"""Owed gradients: holds what a recipe before had not sent, and adds it to the gradients of the next step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.train.engine.extension import Extension, Extensions, GradientUse
from gossamer.train.engine.unsent_gradients import Owed
from gossamer.train.synchronizers.base import Synchronizer

KEY = "owed_gradient"  # in checkpoints, beside what compressors remember


class OwedGradients(Extension):
    """Gradients by parameter name, in plain units, that the optimizer has not seen yet: each is added once.

    The same on every rank where all make the same step; this worker's own where workers train apart. A parameter that
    has no gradient, as in a step that is skipped, and a step with a closure leave them to the next one. It acts in
    steps while any is owed.
    """

    order = 1

    def __init__(self, extensions: Extensions | None = None) -> None:
        self._extensions = extensions or Extensions()
        self._owed: dict[str, Tensor] = {}

    def put(self, owed: Mapping[str, Tensor]) -> None:
        """Owe these, and nothing else. Each in its parameter's shape."""
        self._owed = dict(owed)
        (self._extensions.add if self._owed else self._extensions.discard)(self)

    def take(self) -> dict[str, Tensor]:
        """Owe nothing any more; what was owed."""
        owed = self._owed
        self.put({})
        return owed

    def state(self) -> dict[str, dict[str, Tensor]]:
        """{parameter name: {key: tensor}}, as a session's checkpoint has it."""
        return {name: {KEY: tensor} for name, tensor in self._owed.items()}

    def resume(self, states: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> None:
        """Owe what `state` gave on this worker; or the mean over all workers of another number, whose states these are.
        Other keys are passed over."""
        found: dict[str, Tensor] = {}
        for each in states:
            for name, tensor in ((name, kept[KEY]) for name, kept in each.items() if KEY in kept):
                found[name] = tensor / len(states) + found.get(name, 0)
        self.put(found)

    @torch.no_grad()
    def before_step(self, use: GradientUse) -> None:
        if use.closure or _will_skip(use.optimizer):
            return
        scale = getattr(use.optimizer, "grad_scale", None)  # left in by a GradScaler, for fused optimizers to take out
        for name, gradient in self._due(use.optimizer, use.parameters):
            owed = self._owed.pop(name)
            gradient.add_(owed, alpha=1.0 if scale is None else float(scale))
        self.put(self._owed)

    def _due(self, optimizer: Optimizer, parameters: Mapping[str, Parameter]) -> Iterator[tuple[str, Tensor]]:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name in sorted(self._owed):
            parameter = parameters[name]
            if id(parameter) in held and parameter.grad is not None:
                yield name, parameter.grad


def on_their_way(before: Synchronizer) -> Owed:
    """Means of gradients that have arrived and wait for the step in which they are used; the same on every rank."""
    found: Owed = {}
    for flight in before.progress().get("flights", ()):
        for bucket, mean in zip(before.buckets, flight["means"], strict=False):
            add_owed(found, {slot.name: slot.view(mean) for slot in bucket.layout})
    return found


def add_owed(owed: Owed, more: Mapping[str, Tensor]) -> None:
    """Add to what is owed of each name."""
    for name, tensor in more.items():
        owed[name] = owed[name] + tensor if name in owed else tensor.clone()


def _will_skip(optimizer: Optimizer) -> bool:
    """Whether a GradScaler has told a fused optimizer to leave this step out."""
    found: Tensor | None = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
