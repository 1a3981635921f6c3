"""Step reduction: averages all buckets of a step over the ranks, as one transaction."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from gossamer.compressors import Compressor
from gossamer.compressors.base import aggregate_finite
from gossamer.core.aggregation import AggregationContext, AggregationResult, State
from gossamer.core.coalesce import coalesce
from gossamer.core.layout import FlatTensors, Layout, Slot, first_nonfinite
from gossamer.core.ops import AllGather, AllReduceMean, Script
from gossamer.reducer.bucket import Bucket
from gossamer.reducer.optimizer_settings import compare_settings
from gossamer.reducer.parameter_check import ParameterCheck
from gossamer.reducer.step_report import (
    NOBODY,
    NonFiniteOrigin,
    Presence,
    Standings,
    StepDecision,
    StepReport,
    exchange_reports,
    gather_first_batches,
    gather_standings,
)
from gossamer.runtime.comm_thread import CommThread, Work
from gossamer.runtime.pipeline import DEPTH, Pipeline
from gossamer.runtime.pipeline_tuner import PipelineTuner
from gossamer.runtime.runner import ScriptCost, ScriptRun, broadcast, run_script
from gossamer.runtime.transport import Transport


class Reducible(Protocol):
    """A flat buffer that can be reduced: a bucket, or numbers laid out like one."""

    @property
    def flat(self) -> Tensor: ...
    @property
    def packed(self) -> FlatTensors: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def state(self) -> State: ...
    @property
    def mean_buffer(self) -> Tensor | None:
        """Where the mean may be written; None where the input is needed afterwards."""


@dataclass(frozen=True)
class BucketInput:
    """Is put into a bucket just before it leaves: share * pairs + sums_share * sums."""

    pairs: Sequence[tuple[Tensor, Tensor]] = ()  # (place in the bucket, gradient that does not lie there yet)
    share: float = 1.0
    sums: Tensor | None = None  # of the backward passes before
    sums_share: float = 1.0

    def put(self, flat: Tensor) -> None:
        if self.pairs:
            views, gradients = zip(*self.pairs, strict=True)
            torch._foreach_copy_(views, gradients)
        if self.sums is not None:
            flat.mul_(self.share).add_(self.sums, alpha=self.sums_share)


NO_INPUT = BucketInput()


def without_own(staged: AggregationResult) -> AggregationResult:
    """Without this worker's own contribution, which is as large as the bucket and will not be needed."""
    mean = staged.mean
    return replace(staged, own_contribution=lambda: mean, owes=None)


def with_own(staged: AggregationResult) -> AggregationResult:
    """With this worker's own contribution, computed while it can be."""
    own = staged.own
    return replace(staged, own_contribution=lambda: own, owes=None)


@dataclass(frozen=True, kw_only=True)
class StepTrailer:
    """Goes with the last bucket of a step."""

    report: StepReport
    settings: str  # the optimizer's, told where they are not alike
    check: ParameterCheck
    buffers: Sequence[Sequence[Tensor]]  # the model's, by module; those that moved are broadcast


@dataclass
class StepReduction:
    """Reduces buckets one after the other; the last one takes along what every rank must know before it commits.

    Its methods run on the communication thread. A bucket's second operation travels beside the first ones of later
    buckets, in an order that is the same on every rank (Pipeline). So the means are there after `close`, not before.
    """

    compressor: Compressor
    transport: Transport
    names: Sequence[str]  # of all parameters, in the buckets' order
    at: AggregationContext
    reference: float | None  # the weight that counts as one; agreed upon in the very first reduction
    weight: float  # this worker's
    total: float | None = None  # all workers', where it had to be known before anything was compressed
    keep: Callable[[AggregationResult], AggregationResult] = without_own  # the part of results kept until commit
    window: int = DEPTH  # of the pipeline
    tuner: PipelineTuner | None = None  # chooses the window instead, over all reductions of a synchronizer
    spent: list[ScriptCost] = field(default_factory=list)
    agreed_step: int | None = None  # the step that all ranks make, where it had to be known before anything left
    first_nonfinite: int = NOBODY  # the place of the first tensor that was not finite here
    _staged: dict[int, AggregationResult] = field(init=False, default_factory=dict)  # by the bucket's place
    _left: list[ScriptRun] = field(init=False, default_factory=list)
    _pipeline: Pipeline = field(init=False)
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._pipeline = Pipeline(self.window if self.tuner is None else self.tuner.window)
        self._began = time.perf_counter()

    def open(self, batch: int, warn: Callable[[Sequence[tuple[int, float]]], None]) -> None:
        """Before the first bucket ever: compare first batches, and agree on the weight that counts as one.

        It belongs to the startup checks, not to any step's bytes.
        """
        heard = run_script(gather_first_batches(batch, self.weight), self.transport).result
        weights = [theirs for _, theirs in heard if theirs > 0]
        if weights:
            self.reference = sum(weights) / len(weights)
            warn(heard)

    def weigh(self, trained: Sequence[int], check: ParameterCheck) -> None:
        """All-gather weights and steps first. A compressor's state has its own weight in it already, and a mean could
        not be divided by the new total without dividing that, too; and it must be the state after the same step.

        trained: the ranks that trained in the exchange before, and know whether its averages were used.
        """
        performed = run_script(gather_standings(self.weight, self.at.step), self.transport)
        self.spent.append(performed)
        standings: Standings = performed.result
        self.total = standings.weight
        self.agreed_step = check.agree_on_steps({rank: standings.steps[rank] for rank in trained})
        self.at = replace(self.at, step=self.agreed_step)

    @property
    def factor(self) -> float:
        """By what this worker's gradients are multiplied before they are averaged."""
        if self.total is None:
            return self.weight / (self.reference or 1.0)
        return self.transport.world * self.weight / self.total if self.total else 0.0

    def correction(self, total: float) -> float:
        """By what averages are multiplied, now that the total weight is known."""
        return 1.0 if self.total is not None else self.transport.world * (self.reference or 1.0) / total

    def exchange(self, bucket: Reducible, fresh: BucketInput, scale: float) -> None:
        """Begin to average one bucket in place."""
        self._leave(self._aggregation(bucket, fresh, scale))

    def average(self, flat: Tensor) -> Tensor:
        """Begin to average numbers uncompressed; their weighted mean is written in place."""
        self._leave(_mean(flat, self.factor))
        return flat

    def close(self, bucket: Reducible, fresh: BucketInput, scale: float, trailer: StepTrailer) -> StepDecision:
        """Average the last bucket and finish all before it; the decision from all ranks' reports."""
        last = self._leave(coalesce([self._aggregation(bucket, fresh, scale), self._conclude(trailer.report)]))
        self._pipeline.finish()
        self._try(trailer.report.presence)
        self.spent += [each.performed for each in self._left]
        _, decision = last.performed.result
        if not decision.alike:
            compare_settings(self.transport.all_gather_text(trailer.settings))
        if not decision.in_step:
            trailer.check.agree_on_steps(decision.steps)
        moved = [group for group, has_moved in zip(trailer.buffers, decision.moved, strict=True) if has_moved]
        if moved:
            traveling = [buffer for group in moved for buffer in group]
            self.spent.append(broadcast(self.transport, traveling, source=decision.active[0]))
        return decision  # type: ignore[no-any-return]

    def _try(self, presence: Presence) -> None:
        """Note what this reduction took; ranks compare once a trial is over. No part of any step's bytes.

        A rank without data began to wait at any time, so its seconds say nothing.
        """
        if self.tuner is None:
            return
        self.tuner.ended(time.perf_counter() - self._began if presence == Presence.TRAINING else None)
        if self.tuner.over:
            run_script(self.tuner.compare(), self.transport)

    @property
    def staged(self) -> list[AggregationResult]:
        """Results by bucket, after `close`."""
        return [self._staged[place] for place in sorted(self._staged)]

    def _leave(self, script: Script) -> ScriptRun:
        self._left.append(ScriptRun(script, self.transport))
        self._pipeline.put(self._left[-1])
        return self._left[-1]

    def _aggregation(self, bucket: Reducible, fresh: BucketInput, scale: float) -> Script:
        """The bucket's script, in units that do not change when the loss scale does. Nothing infinite is sent."""
        place = len(self._left)  # a script begins as soon as it is put in
        fresh.put(bucket.flat)
        factor = self.factor / scale
        if factor != 1.0:
            bucket.flat.mul_(factor)

        def lost() -> None:
            if self.first_nonfinite == NOBODY:
                self.first_nonfinite = self.names.index(nonfinite_tensor(bucket, bucket.flat))

        staged = yield from aggregate_finite(
            self.compressor, bucket.packed, bucket.state, self.at, bucket.mean_buffer, lost
        )
        self._staged[place] = self.keep(staged)

    def _conclude(self, report: StepReport) -> Generator[AllGather, Any, StepDecision]:
        """Begins after the last bucket's encoder, so that the report tells what that one found."""
        steps = report.steps if self.agreed_step is None else self.agreed_step
        return (yield from exchange_reports(replace(report, steps=steps, first_nonfinite=self.first_nonfinite)))

    def blame(self, decision: StepDecision, reduced: Sequence[Reducible]) -> NonFiniteOrigin | None:
        """The rank and tensor whose number was not finite; None where all were."""
        if decision.nonfinite:
            rank, place = decision.nonfinite[0]
            return rank, self.names[place]
        for each, staged in zip(reduced, self.staged, strict=True):
            if not staged.finite:
                return None, nonfinite_tensor(each, staged.mean)
        return None

    def costs(self) -> Mapping[str, float]:
        return sum_costs(self.spent)


@dataclass(frozen=True)
class StepContext:
    """The training loop at the first gradient of a backward pass."""

    scale: float | None  # the factor that a GradScaler put into the gradients, None without one
    settings: str  # the optimizer's hyperparameters
    momentum: tuple[float, bool]  # and whether it is Nesterov's, where the compressor applies it
    first_batch: int  # a hash of this rank's

    def scale_of(self, bucket: Bucket) -> float:
        """The factor to take out of a bucket before it is compressed: what is remembered has no loss scale in it."""
        return (self.scale or 1.0) if bucket.state else 1.0


@dataclass
class PendingReduction:
    """One step's reduction of gradients as the training thread sees it: begin, send each bucket, wait, commit."""

    reduction: StepReduction
    buckets: Sequence[Bucket]
    comm_thread: CommThread
    taken: StepContext
    sent: int = 0  # how many buckets have left
    committed: bool = False
    _work: list[Work[Any]] = field(default_factory=list)

    def begin(
        self, warn: Callable[[Sequence[tuple[int, float]]], None], trained: Sequence[int], check: ParameterCheck
    ) -> None:
        """Find out what must be known before the first bucket leaves. trained: the ranks that did in the exchange
        before; where those were not all, the others do not know whether its averages were used."""
        if self.reduction.reference is None:
            self.comm_thread.submit(partial(self.reduction.open, self.taken.first_batch, warn))
        if any(bucket.state for bucket in self.buckets) or len(trained) < self.reduction.transport.world:
            self.comm_thread.submit(partial(self._weigh, trained, check))

    def _weigh(self, trained: Sequence[int], check: ParameterCheck) -> None:
        step = self.reduction.at.step
        self.reduction.weigh(trained, check)
        if self.reduction.at.step < step:
            for bucket in self.buckets:
                bucket.roll_back()

    def send(self, fresh: BucketInput, trailer: StepTrailer | None) -> None:
        """Hand the next bucket to the communication thread; the last one takes this rank's report along."""
        bucket = self.buckets[self.sent]
        scale = self.taken.scale_of(bucket)
        job: Callable[[], Any] = partial(self.reduction.exchange, bucket, fresh, scale)
        if trailer is not None:
            job = partial(self.reduction.close, bucket, fresh, scale, trailer)
        self._work.append(self.comm_thread.submit(job))
        self.sent += 1

    def wait(self) -> StepDecision:
        """Once all buckets were sent: what all ranks decided together."""
        *_, decision = [work.wait() for work in self._work]
        return decision  # type: ignore[no-any-return]

    def commit(self, decision: StepDecision) -> NonFiniteOrigin | None:
        """Show the optimizer the means and remember what compressors remember; or skip the step, and return what was
        not finite."""
        blame, weight = self.reduction.blame(decision, self.buckets), decision.weight
        self.committed = blame is None and weight > 0 and bool(decision.active) and decision.in_step
        used = {name for name, flag in zip(self.reduction.names, decision.used, strict=True) if flag}
        for bucket, staged in zip(self.buckets, self.reduction.staged, strict=True):
            if self.committed:
                correction = self.reduction.correction(weight) * self.taken.scale_of(bucket)
                bucket.commit(staged.next_state, used, correction)
            elif (blame or not decision.in_step) and self.taken.scale is not None:
                bucket.flat.fill_(inf)  # a GradScaler learns from it that the step was skipped
                bucket.point(used)
            else:
                bucket.point(set())  # optimizers do nothing without gradients, unlike with zeros
        return blame


def sum_costs(spent: Sequence[ScriptCost]) -> Mapping[str, float]:
    """By the names of events.StepEnded."""
    parts = ("encode_seconds", "wire_seconds", "decode_seconds", "bytes_sent")
    return {part: sum(getattr(each, part) for each in spent) for part in parts}


def _mean(flat: Tensor, factor: float) -> Generator[AllReduceMean, Any, None]:
    yield AllReduceMean(flat.mul_(factor), out=flat)


def nonfinite_tensor(bucket: Reducible, flat: Tensor) -> str:
    """The first tensor that is not finite, or else the one with the largest entry."""

    def largest(slot: Slot) -> float:
        return float(slot.flat_view(flat).abs().amax())

    return (
        first_nonfinite(FlatTensors(flat, bucket.layout))
        or max((slot for slot in bucket.layout if slot.numel), key=largest).name
    )
