"""The training loop as seen by the engine: source of gradients, values of a step, and reports to the loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from gossamer.base.aggregation import NO_MOMENTS, Moments
from gossamer.train.engine.autograd_hooks import BackwardMonitor, LoopControls
from gossamer.train.engine.extension import Extensions
from gossamer.train.engine.frozen_parameters import FrozenParameters
from gossamer.train.engine.parameter_check import ParameterCheck
from gossamer.train.engine.step_decision import Agreement, NonFiniteOrigin, unchanged
from gossamer.train.engine.tensor_sampler import TensorSampler
from gossamer.train.engine.weight_copies import WeightCopies


class GradientWatch(Protocol):
    """Watches a source of gradients until it is closed."""

    def close(self) -> None: ...


class GradientSource(Protocol):
    """A source of gradients. In each backward pass that reaches some of `parameters` it calls `began`, then `ready` for
    each gradient, then `over`. It makes no calls while `controls` are muted."""

    def __call__(
        self,
        parameters: Mapping[str, Tensor],
        over: Callable[[], None],
        began: Callable[[], None] = ...,
        ready: Callable[[str, Tensor], None] | None = ...,
        controls: LoopControls | None = ...,
    ) -> GradientWatch: ...


@dataclass(frozen=True)
class StepContext:
    """Values of the training loop at the first gradient of a backward pass, or when a sync round is sent."""

    scale: float | None = None  # loss scale of the GradScaler; None without one
    settings: str = ""  # the optimizer's hyperparameters
    moments: Moments = NO_MOMENTS  # the part of the optimizer that the compressor applies
    first_batch: int = 0  # a hash of this rank's first batch
    lap: int = 0  # this rank's position in its data, in half epochs


StepCosts = Mapping[str, float]  # by the field names of events.StepEnded


# An exchange; a backward pass with local gradients; the same, reported some steps later
JudgedAt = Literal["exchange", "pass", "earlier pass"]


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """The training loop as seen by synchronizers: values that they read and callbacks for their reports."""

    now: Callable[[], StepContext]  # the loop's values, read once per step or round
    scale: Callable[[], float | None]  # the loss scale alone
    buffers: Callable[[], Sequence[Sequence[Tensor]]]  # the model's, by module
    averaged: Callable[[], Mapping[str, Tensor]]  # state averaged together with parameters: see ModelBuffers
    frozen: FrozenParameters  # of the model
    copies: WeightCopies  # the optimizer's copies of parameters, updated with them
    warn: Callable[[Sequence[tuple[int, float]]], None]  # receives (hash, weight) of all ranks' first batches
    ended: Callable[[bool, StepCosts], None]  # a step ended: whether it was skipped, and its costs
    judged: Callable[[JudgedAt, NonFiniteOrigin | None], None]  # an exchange or pass ended, with the non-finite tensor
    check: ParameterCheck  # of parameters and steps, among all ranks in lock step
    missed: Callable[[], None] = lambda: None  # on a rank out of data, after each pass of the others
    divide_data: Callable[[Sequence[int]], None] = lambda shares: None  # by the ranks' new shares of a step
    agree: Agreement = unchanged  # combines non-finite origins of all ranks that hold parts of this replica
    agree_in_round: Agreement = unchanged  # the same on the communication thread
    sparse: Callable[[], Collection[str]] = frozenset  # names of parameters with sparse gradients
    extensions: Extensions = field(default_factory=Extensions)  # synchronizers call their `pass_began`
    gradients: GradientSource = BackwardMonitor
    tensors: TensorSampler | None = None  # measures the costs of tensors
    clips: bool = False  # whether gradients are clipped between backward and the optimizer step
