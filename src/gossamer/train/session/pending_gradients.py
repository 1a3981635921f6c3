"""Pending gradients: unsent gradients of an earlier recipe, which are added to the gradients of the next step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.train.engine.extension import Extension, Extensions, GradientUse
from gossamer.train.engine.unsent_gradients import Unsent
from gossamer.train.synchronizers.base import Synchronizer

KEY = "owed_gradient"  # in checkpoints, next to the state of compressors


class PendingGradients(Extension):
    """Gradients by parameter name, without loss scale, that the optimizer has not used yet. Each is added once.

    They are equal on all ranks in lock step, and local to each worker with local training. Steps with a closure, and
    parameters without a gradient, as in a skipped step, leave them for a later step. Active only while there are any.
    """

    order = 1

    def __init__(self, extensions: Extensions | None = None) -> None:
        self._extensions = extensions or Extensions()
        self._pending: dict[str, Tensor] = {}

    def put(self, pending: Mapping[str, Tensor]) -> None:
        """Replace the pending gradients, each with its parameter's shape."""
        self._pending = dict(pending)
        (self._extensions.add if self._pending else self._extensions.discard)(self)

    def take(self) -> dict[str, Tensor]:
        """Remove and return the pending gradients."""
        pending = self._pending
        self.put({})
        return pending

    def state(self) -> dict[str, dict[str, Tensor]]:
        """State for a session's checkpoint: {parameter name: {key: tensor}}."""
        return {name: {KEY: tensor} for name, tensor in self._pending.items()}

    def resume(self, states: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> None:
        """Restore the result of `state` on this worker, or the mean of the results of another number of workers.
        Other keys are ignored."""
        found: dict[str, Tensor] = {}
        for each in states:
            for name, tensor in ((name, kept[KEY]) for name, kept in each.items() if KEY in kept):
                found[name] = tensor / len(states) + found.get(name, 0)
        self.put(found)

    @torch.no_grad()
    def before_step(self, use: GradientUse) -> None:
        if use.closure or _will_skip(use.optimizer):
            return
        scale = getattr(use.optimizer, "grad_scale", None)  # set by a GradScaler for fused optimizers to divide by
        for name, gradient in self._due(use.optimizer, use.parameters):
            pending = self._pending.pop(name)
            gradient.add_(pending, alpha=1.0 if scale is None else float(scale))
        self.put(self._pending)

    def _due(self, optimizer: Optimizer, parameters: Mapping[str, Parameter]) -> Iterator[tuple[str, Tensor]]:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name in sorted(self._pending):
            parameter = parameters[name]
            if id(parameter) in held and parameter.grad is not None:
                yield name, parameter.grad


def on_their_way(before: Synchronizer) -> Unsent:
    """Means of gradients that have arrived and wait for the step in which they are used; the same on every rank."""
    found: Unsent = {}
    for flight in before.progress().get("flights", ()):
        for bucket, mean in zip(before.buckets, flight["means"], strict=False):
            add_pending(found, {slot.name: slot.view(mean) for slot in bucket.layout})
    return found


def add_pending(pending: Unsent, more: Mapping[str, Tensor]) -> None:
    """Add tensors to those of the same names."""
    for name, tensor in more.items():
        pending[name] = pending[name] + tensor if name in pending else tensor.clone()


def _will_skip(optimizer: Optimizer) -> bool:
    """Whether a GradScaler has found non-finite gradients, so that a fused optimizer will skip this step."""
    found: Tensor | None = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
