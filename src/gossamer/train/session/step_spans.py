"""Step spans: hooks that tell the trace where forward, backward and the optimizer's step begin and end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gossamer.base.spans import active
from gossamer.base.spans.record_format import SpanKind
from gossamer.errors import AttachError
from gossamer.train.session.first_batch import tensors_in
from gossamer.train.session.operator_profile import PROFILED, profile_as_told
from gossamer.train.world_state import WorldState

StepHook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]


def begin_tracing(world: WorldState) -> None:
    """Record this process's spans where the environment says so. Raises AttachError where they cannot be written."""
    try:
        active.begin_as_told(world.rank, world.size)
    except OSError as error:
        raise AttachError(
            f"the trace of rank {world.rank} would go to {error.filename}, and nothing can be written there "
            f"({error.strerror}). Name another folder: {active.TRACE}=DIRECTORY"
        ) from None
    except ValueError as error:
        raise AttachError(f"{active.STEPS}={error}") from None
    if active.recorder is not None:
        try:
            profile_as_told(active.recorder)
        except ValueError as error:
            raise AttachError(f"{PROFILED}={error}") from None


def hooks(model: nn.Module, optimizer: Optimizer, before: StepHook, after: StepHook) -> list[RemovableHandle]:
    """Hooks around the optimizer's step; and where spans are recorded, around them, those that tell when it was."""
    if active.recorder is None:
        return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    spans = StepSpans()
    return [
        model.register_forward_pre_hook(spans.forward_begins),
        model.register_forward_hook(spans.forward_ended),
        optimizer.register_step_pre_hook(spans.step_begins),
        optimizer.register_step_pre_hook(before),
        optimizer.register_step_post_hook(spans.step_ended),
        optimizer.register_step_post_hook(after),
    ]


class StepSpans:
    """The training thread's spans between its own hooks. What synchronizers do after a step is not in the step."""

    def __init__(self) -> None:
        self._forward_began: float | None = None
        self._step_began: float | None = None

    def forward_begins(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if active.recorder is not None and not torch.compiler.is_compiling():
            if active.recorder.follow is not None:
                active.recorder.follow(active.recorder.recording)
            self._forward_began = time.perf_counter()

    def forward_ended(self, model: nn.Module, args: tuple[Any, ...], output: object) -> None:
        began, self._forward_began = self._forward_began, None
        if active.recorder is None or began is None or torch.compiler.is_compiling():
            return
        active.recorder.add(SpanKind.FORWARD, began, time.perf_counter())
        if torch.is_grad_enabled():
            for tensor in _differentiable(output):
                tensor.register_hook(_backward_begins)

    def step_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._step_began = time.perf_counter()

    def step_ended(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        began, self._step_began = self._step_began, None
        if active.recorder is not None and began is not None:
            active.recorder.add(SpanKind.OPTIMIZER, began, time.perf_counter())


def _differentiable(output: object) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_in(output) if tensor.requires_grad and not tensor.is_leaf)


def _backward_begins(gradient: Tensor) -> None:
    """The loss's gradient has come back to the model's output."""
    if active.recorder is not None:
        active.recorder.backward_begins()
