"""Step spans: hooks that record forward, backward and the optimizer's step for the trace."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.hooks import RemovableHandle

from gossamer.base.spans import active
from gossamer.base.spans.record_format import CLOCK_MARK, OPERATORS_SUFFIX, SpanKind
from gossamer.base.spans.recorder import SpanRecorder
from gossamer.base.torch_hooks import ForwardHook, uncompiled
from gossamer.errors import AttachError
from gossamer.train.session.first_batch import tensors_in
from gossamer.train.world_state import WorldState

StepHook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]


def begin_tracing(world: WorldState) -> None:
    """Record this process's spans if the environment requests it. Raises AttachError if they cannot be written."""
    try:
        active.begin_from_environment(world.rank, world.size)
    except OSError as error:
        raise AttachError(
            f"the trace of rank {world.rank} cannot be written to {error.filename} "
            f"({error.strerror}). Name another folder: {active.TRACE}=DIRECTORY"
        ) from None
    except ValueError as error:
        raise AttachError(f"{active.STEPS}={error}") from None
    if active.recorder is not None:
        try:
            profile_from_environment(active.recorder)
        except ValueError as error:
            raise AttachError(f"{PROFILED}={error}") from None


def hooks(model: nn.Module, optimizer: Optimizer, before: StepHook, after: StepHook) -> list[RemovableHandle]:
    """Hooks around the optimizer's step; if spans are recorded, with hooks around them that record its time."""
    if active.recorder is None:
        return [
            optimizer.register_step_pre_hook(uncompiled(before)),
            optimizer.register_step_post_hook(uncompiled(after)),
        ]
    spans = StepSpans()
    return [
        model.register_forward_pre_hook(ForwardHook(spans.forward_begins)),
        model.register_forward_hook(ForwardHook(spans.forward_ended)),
        optimizer.register_step_pre_hook(uncompiled(spans.step_begins)),
        optimizer.register_step_pre_hook(uncompiled(before)),
        optimizer.register_step_post_hook(uncompiled(spans.step_ended)),
        optimizer.register_step_post_hook(uncompiled(after)),
    ]


class StepSpans:
    """The training thread's spans between its own hooks. Work of synchronizers after a step is not part of it."""

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
                tensor.register_hook(uncompiled(_backward_begins))

    def step_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._step_began = time.perf_counter()

    def step_ended(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        began, self._step_began = self._step_began, None
        if active.recorder is not None and began is not None:
            active.recorder.add(SpanKind.OPTIMIZER, began, time.perf_counter())


def _differentiable(output: object) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_in(output) if tensor.requires_grad and not tensor.is_leaf)


def _backward_begins(gradient: Tensor) -> None:
    """Called when backward reaches the model's output."""
    if active.recorder is not None:
        active.recorder.backward_begins()


# -- torch.profiler around the traced steps of chosen ranks ------------------------------------------------------------

# Its file is next to that of the spans and has the same name. A mark in it has the time of this process's clock, by
# which operators are converted to the clock of all ranks.

PROFILED = "GOSSAMER_TORCH_PROFILER"
MOST_PASSES = 50  # forward passes; each has thousands of operators, which stay in memory until the last pass
MARKS = 5  # of the clock; the one with the smallest delay is used
_RANKS = re.compile(r"[0-9]+(,[0-9]+)*")


def read_ranks(text: str) -> frozenset[int] | None:
    """Parse ranks such as 0,2; None for "all". Raises ValueError with the line to write."""
    if text == "all":
        return None
    if not _RANKS.fullmatch(text):
        raise ValueError(f'ranks must be separated by commas, such as 0,2, or "all", got "{text}"')
    return frozenset(map(int, text.split(",")))


def profile_from_environment(recorder: SpanRecorder) -> None:
    """Profile operators if the environment chooses this rank. Raises ValueError."""
    text = os.environ.get(PROFILED)
    if text and recorder.follow is None:
        ranks = read_ranks(text)
        if ranks is None or recorder.rank in ranks:
            recorder.follow = OperatorProfile(recorder)


class OperatorProfile:
    """Called on the training thread before each forward pass, with whether it is recorded.

    It is not called in hooks of the optimizer: torch wraps its step into a record_function, and a profiler that stops
    within one crashes the process.
    """

    def __init__(self, recorder: SpanRecorder) -> None:
        self._path = recorder.path.with_suffix(OPERATORS_SUFFIX)
        self._profile: profile | None = None
        self._left = MOST_PASSES

    def __call__(self, recording: bool) -> None:
        try:
            if recording and self._profile is None and self._left:
                self._begin()
            elif self._profile is not None:
                self._left -= 1
                if not recording or not self._left:
                    self._end(self._profile, full=recording)
        except (OSError, RuntimeError, AssertionError) as error:  # for example if the script runs a profiler itself
            self._profile, self._left = None, 0
            _warn("operators are not profiled (%s). Training continues.", str(error).split("\n")[0])

    def _begin(self) -> None:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        begun = profile(activities=kinds)
        begun.start()
        self._profile = begun
        for _ in range(MARKS):
            with record_function(f"{CLOCK_MARK}{time.perf_counter():.9f}"):
                pass

    def _end(self, ended: profile, *, full: bool) -> None:
        self._profile = None
        ended.stop()
        if not self._path.exists():
            ended.export_chrome_trace(str(self._path))
        if full:
            _warn("operators of %d forward passes are in %s, and no more are profiled.", MOST_PASSES, self._path.name)


def _warn(text: str, *about: object) -> None:
    logging.getLogger("gossamer").warning(text, *about)
