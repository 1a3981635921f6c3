"""Sync rounds in flight: outgoing tensors of a fragment, their reduction on the communication thread, the result.

A RoundTask defines which values are sent, and how the mean is applied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import hypot
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms.strategies import SyncRound
from gossamer.base.aggregation import AggregationContext, State
from gossamer.base.kernels import all_finite
from gossamer.base.layout import FlatTensors, accumulation_dtype
from gossamer.base.runner import ScriptCost
from gossamer.comm.runtime.comm_thread import Work
from gossamer.events import sampled
from gossamer.train.engine.averaged_state import AveragedState
from gossamer.train.engine.bucket import NO_INPUT, Bucket, KeptInputs
from gossamer.train.engine.bucket_reduction import StepReduction, StepTrailer, sum_costs, with_own, without_own
from gossamer.train.engine.loop import StepCosts
from gossamer.train.engine.participation import StepPace
from gossamer.train.engine.step_decision import (
    NO_FLAGS,
    Agreement,
    Flags,
    NonFiniteOrigin,
    Presence,
    StepDecision,
    unchanged,
)
from gossamer.train.synchronizers.base import NamedState, SyncContext


@dataclass
class Fragment:
    """Buckets that are sent together."""

    buckets: Sequence[Bucket]
    weight: float = 0.0  # of all samples since the fragment's last round
    steps: int = 0  # local steps since then, if they follow the workers' speeds

    @property
    def names(self) -> list[str]:
        return [name for bucket in self.buckets for name in bucket.layout.names]


class OutgoingBucket:
    """Outgoing values in a bucket's layout, compressed with its state.

    Args:
        keeps: whether they are needed when the mean arrives.
    """

    def __init__(self, bucket: Bucket, flat: Tensor, keeps: bool) -> None:
        self.bucket, self.flat, self.keeps = bucket, flat, keeps
        self.layout, self.packed = bucket.layout, FlatTensors(flat, bucket.layout)
        self.mean_buffer = None if keeps else flat

    @property
    def state(self) -> State:
        return self.bucket.state


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """Result of a sync round; means, owns and averaged_state only if it was committed."""

    committed: bool = False
    means: Sequence[Tensor] = ()  # by outgoing bucket
    owns: Sequence[Tensor | None] = ()  # this rank's contributions to the means, if the strategy needs them
    averaged_state: Tensor | None = None
    used: Sequence[bool] = ()  # by parameter: some rank had a gradient
    blame: NonFiniteOrigin | None = None
    active: bool = True  # some rank continues training
    all_trained: bool = False  # every rank does
    stop: bool = False  # the run ends
    lag: float | None = None  # norm of unsent values over norm of offered ones, if measured
    parted: tuple[int, ...] = ()  # ranks with differing parameters
    awaited: bool = False  # new workers wait for admission
    paces: tuple[StepPace, ...] = ()  # by rank, if local steps follow the workers' speeds
    mean_steps: float = 0.0  # their weighted mean number of local steps
    shortage: str = ""  # why memory ran out; no rank uses the round then
    costs: StepCosts = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OutgoingRound:
    """A sync round from the training thread; its methods run on the communication thread."""

    buckets: Sequence[OutgoingBucket]
    averaged_state: Tensor | None
    trailer: StepTrailer
    weight: float  # of this rank's samples since the fragment's last round
    at: AggregationContext
    first_batch: int  # a hash
    measures_lag: bool = False
    agree: Agreement = unchanged  # on non-finite values, with ranks that hold other parts of the model

    def reduction(
        self,
        context: SyncContext,
        participants: ScriptCost,
        reference: float | None,
        kept: KeptInputs | None = None,
    ) -> StepReduction:
        """Reduction among the participating ranks. If offers are kept, all ranks have equal weight: reverting an offer
        requires that its weight is the same in every round."""
        keeps = self.buckets[0].keeps
        return StepReduction(
            context.compressor,
            context.transport,
            [name for outgoing in self.buckets for name in outgoing.layout.names],
            replace(self.at, rank=context.transport.rank, world=context.transport.world),
            reference,
            weight=1.0 if keeps else self.weight,
            total=float(context.transport.world) if keeps else participants.result.weight,
            keep=with_own if keeps else without_own,
            spent=[participants],
            kept=kept,
            sampler=context.loop.tensors if sampled() else None,
        )

    def run(self, reduction: StepReduction, *, active: bool) -> RoundResult:
        """Reduce all buckets and commit the result, before the next round is sent."""
        *before, last = self.buckets
        offered = norm_of([outgoing.flat for outgoing in self.buckets]) if self.measures_lag else 0.0
        for outgoing in before:
            reduction.exchange(outgoing, NO_INPUT, 1.0)
        mean = None if self.averaged_state is None else reduction.average(self.averaged_state)
        decision = reduction.close(last, NO_INPUT, 1.0, self.trailer)
        blame = reduction.blame(decision, self.buckets)
        if blame is None and mean is not None and not all_finite(mean):
            blame = None, "buffers"
        blame = self.agree(blame)
        result = RoundResult(
            blame=blame,
            active=active,
            all_trained=decision.all_trained,
            stop=decision.stop,
            parted=decision.parted,
            shortage=reduction.shortage,
            costs=sum_costs(reduction.spent),
        )
        if blame is not None or decision.short or not reduction.total:
            return result
        return replace(self._commit(result, reduction, decision, mean), lag=self._lag(offered))

    def _lag(self, offered: float) -> float | None:
        unsent = [tensor for outgoing in self.buckets for tensor in outgoing.bucket.unsent]
        return norm_of(unsent) / offered if offered and unsent else None

    def _commit(
        self, result: RoundResult, reduction: StepReduction, decision: StepDecision, mean: Tensor | None
    ) -> RoundResult:
        staged = reduction.staged
        for outgoing, each in zip(self.buckets, staged, strict=True):
            outgoing.bucket.state = each.next_state.after(outgoing.bucket.state)
        return replace(
            result,
            committed=True,
            means=[each.mean for each in staged],
            owns=[each.own if self.buckets[0].keeps else None for each in staged],
            averaged_state=mean,
            used=decision.used.tolist(),
        )


@dataclass(frozen=True)
class InFlightRound:
    """A sync round that was sent and not yet applied."""

    number: int
    sync_round: SyncRound
    outgoing: Sequence[OutgoingBucket]
    work: Work[RoundResult]
    along: Sequence[str] | None = None  # names of the model state that it averages; None: of an earlier version
    sent: Mapping[str, Tensor] = field(default_factory=dict)  # copies of that state that landing needs
    steps: int = 0  # local steps of this rank that it includes, if they follow the workers' speeds

    def written(self) -> dict[str, Any]:
        """Content for a checkpoint, to apply the round after a resume. Waits until its result has arrived."""
        result = self.work.wait()
        return {
            "number": self.number,
            "along": None if self.along is None else list(self.along),
            "sent": dict(self.sent),
            **({"steps": self.steps, "mean_steps": result.mean_steps} if self.steps else {}),
            "committed": result.committed,
            "stop": result.stop,
            "riders": result.averaged_state,
            "used": list(result.used),
            "means": list(result.means),
            "owns": [own for own in result.owns if own is not None],
            "offers": [outgoing.flat for outgoing in self.outgoing if outgoing.keeps],
        }


def norm_of(tensors: Iterable[Tensor]) -> float:
    """|x| of all tensors together, in float64 on the host, summed in accumulation_dtype; 0 without tensors."""
    return hypot(*(float(torch.linalg.vector_norm(each, dtype=accumulation_dtype(each.dtype))) for each in tensors))


def read_result(written: Mapping[str, Any]) -> RoundResult:
    """Restore the result of a round from InFlightRound.written()."""
    means = [mean.clone() for mean in written["means"]]
    owns = [own.clone() for own in written["owns"]] or [None] * len(means)
    about = {key: written[key] for key in ("committed", "stop", "used")}
    about["mean_steps"] = written.get("mean_steps", 0.0)
    return RoundResult(means=means, owns=owns, averaged_state=written["riders"], **about)


# -- which values of a bucket a scheduled synchronizer sends, and how the mean is applied ------------------------------


class RoundTask(ABC):
    """Called by a ScheduledSynchronizer on the training thread: `offer` when a round is sent, `apply` or `revert` when
    it lands."""

    in_backward = False  # rounds are sent and land at the end of a backward pass, not after the optimizer step
    keeps_alike = False  # parameters are equal on all ranks at every step
    merges_own = False  # the merged parameters are the mean of the workers' own, not `agreed`
    keeps_offers = False  # the offer is needed when the mean arrives
    guards_gradients = False  # drop non-finite gradients before the optimizer uses them
    agreed_state: Mapping[str, Tensor] = MappingProxyType({})  # the model's other state by name, as last averaged

    def check_pass(self, *, counted: bool) -> None:  # noqa: B027 - most can use any number of them
        """Called after a backward pass. counted: whether this is not the first one since the last step. Raises
        LoopError if only one is allowed."""

    def check_step(self, *, closure: bool) -> None:  # noqa: B027 - most work with any optimizer
        """Called before the optimizer step. Raises LoopError if a closure is not allowed."""

    @abstractmethod
    def offer(self, bucket: Bucket, presence: Presence) -> Tensor:
        """Values of a bucket to send: (n,)."""

    @abstractmethod
    def averaged_state(self, number: int, landed: InFlightRound | None = None) -> AveragedState:
        """State that round `number` averages uncompressed; of a round that was sent, the state that it averages."""

    def used(self, buckets: Sequence[Bucket], presence: Presence) -> Flags:
        """Whether each parameter of a fragment has a gradient on this rank, if the other ranks need it."""
        return NO_FLAGS

    @abstractmethod
    def apply(self, landed: InFlightRound, result: RoundResult) -> None:
        """Apply the committed result of a round."""

    @abstractmethod
    def revert(self, landed: InFlightRound) -> None:
        """Undo the offer: values of a rank were not finite, so the round was not committed."""

    def nothing_landed(self) -> None:  # noqa: B027 - most have nothing to show
        """Called if no round was due to land at this boundary."""

    @property
    def agreed(self) -> Mapping[str, Tensor] | None:
        """Parameters and other state by name that all workers agree on; None if these are the model's own."""
        return None

    @property
    def state(self) -> NamedState:
        """State for checkpoints: {parameter name: {key: tensor}}, as views."""
        return {}

    def adopt_memory(self) -> None:  # noqa: B027 - most remember nothing
        """Set the parameters to values that fit the state, after it was received from another worker."""

    def restart(self) -> None:  # noqa: B027 - most remember nothing
        """Called after the parameters were overwritten with values that all workers agree on."""

    def end_epoch(self, missed: int) -> int:
        """Return how many of the `missed` steps this rank has to catch up with."""
        return 0


def taken_along(averaged: Mapping[str, Tensor], landed: InFlightRound | None) -> Mapping[str, Tensor]:
    """Averaged tensors of the model that a round includes. Rounds saved by an earlier version have no counters."""
    if landed is None:
        return averaged
    names = landed.along
    if names is None:
        names = [name for name, tensor in averaged.items() if tensor.is_floating_point()]
    return {name: averaged[name] for name in names}
