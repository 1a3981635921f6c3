"""The training loop as the engine sees it: where gradients come from, values of a step, and reports to the loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from gossamer.base.aggregation import NO_MOMENTS, Moments
from gossamer.train.engine.frozen_parameters import FrozenParameters
from gossamer.train.engine.parameter_check import ParameterCheck
from gossamer.train.engine.report import Agreement, NonFiniteOrigin, unchanged
from gossamer.train.engine.tensor_sampler import TensorSampler
from gossamer.train.engine.torch_hooks import BackwardMonitor, LoopControls
from gossamer.train.engine.weight_copies import WeightCopies


class GradientWatch(Protocol):
    """Watches a source of gradients until it is closed."""

    def close(self) -> None: ...


class GradientSource(Protocol):
    """A source of gradients. In each backward pass that reaches some of `parameters` it calls `began`, then `ready` for
    each gradient as it is there, then `over`. It makes no calls while `controls` are muted."""

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
    """The training loop at the first gradient of a backward pass, or where a sync round leaves."""

    scale: float | None = None  # the factor that a GradScaler put into the gradients, None without one
    settings: str = ""  # the optimizer's hyperparameters
    moments: Moments = NO_MOMENTS  # what the compressor applies of the optimizer's
    first_batch: int = 0  # a hash of this rank's
    lap: int = 0  # this rank's position in its data, in half epochs


StepCosts = Mapping[str, float]  # by the names of events.StepEnded


# An exchange; a backward pass whose gradients stay here; the same some steps later
JudgedAt = Literal["exchange", "pass", "earlier pass"]


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """The training loop as synchronizers see it: what they ask it at a moment, and what they report to it."""

    now: Callable[[], StepContext]  # the loop's values, read once a step or round
    scale: Callable[[], float | None]  # its `scale` alone
    buffers: Callable[[], Sequence[Sequence[Tensor]]]  # the model's, by module
    averaged: Callable[[], Mapping[str, Tensor]]  # what is averaged along where parameters are: see ModelBuffers
    frozen: FrozenParameters  # of the model
    copies: WeightCopies  # that the optimizer keeps of parameters, which must move with them
    warn: Callable[[Sequence[tuple[int, float]]], None]  # takes all ranks' (hash, weight)
    ended: Callable[[bool, StepCosts], None]  # a step ended: whether it was skipped, and what it took
    judged: Callable[[JudgedAt, NonFiniteOrigin | None], None]  # what was not finite in what has ended, if anything
    check: ParameterCheck  # of parameters and steps, among all ranks in lock step
    agree: Agreement = unchanged  # what was not finite, here or in another rank's part of the model
    agree_in_round: Agreement = unchanged  # the same on the communication thread
    sparse: Callable[[], Collection[str]] = frozenset  # names of parameters whose gradients are sparse
    begins: Callable[[], None] = lambda: None  # a pass whose gradients travel; raises where there must be none any more
    gradients: GradientSource = BackwardMonitor
    tensors: TensorSampler | None = None  # measures what tensors cost
    clips: bool = False  # whether gradients are clipped between backward and the optimizer's step
