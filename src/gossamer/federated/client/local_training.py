"""Local training: watches a device's own loop, counts its steps, and changes its gradients as the strategy asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gossamer.core.layout import FlatTensors
from gossamer.federated.model_state import ModelState
from gossamer.strategies.federated import FederatedStrategy
from gossamer.strategies.federated.base import Memory


class LocalTraining:
    """One device's training in one round.

    The user's loop is left as it is. Each step of any optimizer that holds a parameter of the model is counted, and its
    gradients are changed just before it, as FedProx and SCAFFOLD want it.
    """

    def __init__(
        self,
        strategy: FederatedStrategy,
        state: ModelState,
        model: nn.Module,
        anchor: Tensor,
        shared: Memory,
        memory: Memory,
    ) -> None:
        self.steps = 0
        self._rates = 0.0
        self._strategy, self._state = strategy, state
        self._names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._anchor = FlatTensors(anchor, state.layout)
        self._shared = {key: FlatTensors(flat, state.layout) for key, flat in shared.items()}
        self._memory = {key: FlatTensors(flat, state.layout) for key, flat in memory.items()}

    @property
    def learning_rate(self) -> float:
        """The mean over the steps, weighted alike."""
        return self._rates / max(self.steps, 1)

    @contextmanager
    def watching(self) -> Iterator[LocalTraining]:
        """Hooks on every optimizer's steps, while the user's loop runs."""
        before = register_optimizer_step_pre_hook(self._before_step)
        after = register_optimizer_step_post_hook(self._after_step)
        try:
            yield self
        finally:
            before.remove()
            after.remove()

    def _ours(self, optimizer: Optimizer) -> list[tuple[nn.Parameter, str, float]]:
        return [
            (parameter, self._names[parameter], float(group["lr"]))
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter in self._names
        ]

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._strategy.changes_gradients:
            return
        for parameter, name, _ in self._ours(optimizer):
            if parameter.grad is not None:
                self._strategy.correct(
                    parameter.grad,
                    parameter,
                    self._anchor[name],
                    _views(self._shared, name),
                    _views(self._memory, name),
                )

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ours = self._ours(optimizer)
        if ours:
            self.steps += 1
            self._rates += sum(rate for *_, rate in ours) / len(ours)


def _views(memory: Mapping[str, FlatTensors], name: str) -> Memory:
    return {key: packed[name] for key, packed in memory.items()}
