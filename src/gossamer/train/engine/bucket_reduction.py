"""Bucket reduction: averages all buckets of a step over the ranks, as one transaction.

StepReduction runs on the communication thread; PendingReduction controls the same step from the training thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.compressors.base import aggregate_finite
from gossamer.base import flight_recorder
from gossamer.base.aggregation import AggregationContext, AggregationResult, State
from gossamer.base.kernels import within_range
from gossamer.base.layout import FlatTensors, Layout, Slot, first_nonfinite
from gossamer.base.ops import AllGather, AllReduceMean, Script, coalesce
from gossamer.base.runner import ScriptCost, ScriptRun, broadcast, run_script
from gossamer.base.transport import Transport
from gossamer.comm.runtime.comm_thread import CommThread, Work
from gossamer.comm.runtime.pipeline import DEPTH, Pipeline, PipelineTuner
from gossamer.comm.runtime.transaction import Transaction
from gossamer.train.engine.bucket import Bucket, BucketInput, KeptInputs
from gossamer.train.engine.device_failures import device_failure, shortage
from gossamer.train.engine.loop import StepContext
from gossamer.train.engine.parameter_check import ParameterCheck
from gossamer.train.engine.sparse_gradients import Rows, SparseGradients, mean_rows
from gossamer.train.engine.step_decision import (
    ALL_FINITE,
    SHORT_OF_MEMORY,
    Agreement,
    NonFiniteOrigin,
    Presence,
    Standings,
    StepDecision,
    StepReport,
    compare_settings,
    decide,
    encode,
    gather_first_batches,
    gather_standings,
    refuse_newcomers,
    unchanged,
)
from gossamer.train.engine.tensor_sampler import Metered, TensorSampler


class Reducible(Protocol):
    """A flat buffer that can be reduced: a bucket, or values with such a layout."""

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
        """Buffer for the mean: the input or separate memory; None to allocate one."""


def without_own(staged: AggregationResult) -> AggregationResult:
    """Drop this worker's own contribution, which is as large as the bucket, if it is not needed."""
    mean = staged.mean
    return replace(staged, own_contribution=lambda: mean, owes=None)


def with_own(staged: AggregationResult) -> AggregationResult:
    """Keep this worker's own contribution, computed now, before its inputs are overwritten."""
    own = staged.own
    return replace(staged, own_contribution=lambda: own, owes=None)


def unsampled() -> int:
    """The checksum in a report without a comparison of parameters."""
    return 0


@dataclass(frozen=True, kw_only=True)
class StepTrailer:
    """Data that is sent with the last bucket of a step."""

    report: StepReport
    settings: str  # the optimizer's, for a message if ranks differ
    check: ParameterCheck
    buffers: Sequence[Sequence[Tensor]]  # the model's, by module; changed ones are broadcast
    sample: Callable[[], int] = unsampled  # checksum for the report, on the communication thread, which may wait for it


@dataclass
class StepReduction:
    """Reduces buckets one after the other; the last one carries the report that every rank needs before it commits.

    Its methods run on the communication thread. A bucket's second operation is sent together with the first operations
    of later buckets, in an order that is the same on every rank (Pipeline), so means are complete only after `close`.
    """

    compressor: Compressor
    transport: Transport
    names: Sequence[str]  # of all parameters, in the buckets' order; those of sparse gradients at the end
    at: AggregationContext
    reference: float | None  # the weight that counts as 1; agreed on in the first reduction
    weight: float  # this worker's
    total: float | None = None  # of all workers, if it must be known before compression
    keep: Callable[[AggregationResult], AggregationResult] = without_own  # the part of results kept until commit
    window: int = DEPTH  # of the pipeline
    tuner: PipelineTuner | None = None  # chooses the window instead, over all reductions of a synchronizer
    kept: KeptInputs | None = None  # copies of inputs, if the group may change
    sampler: TensorSampler | None = None  # measures the costs of tensors
    spent: list[ScriptCost] = field(default_factory=list)
    since: int = 0  # the step from which compressors count
    agreed_step: int | None = None  # the common step of all ranks, if it must be known before the first bucket
    first_nonfinite: int = ALL_FINITE  # the index of the first non-finite tensor here, or SHORT_OF_MEMORY
    shortage: str = ""  # where memory ran out on this rank; after `close`, on any rank
    rows: Mapping[str, Rows] = field(default_factory=dict)  # means of sparse gradients, after `close_with_rows`
    staged: list[AggregationResult] = field(init=False, default_factory=list)  # by bucket, after `close`
    _staged: dict[int, AggregationResult] = field(init=False, default_factory=dict)  # by bucket index
    _left: list[ScriptRun] = field(init=False, default_factory=list)
    _pipeline: Pipeline = field(init=False)
    _began: float = field(init=False)
    _given_total: float | None = field(init=False)

    def __post_init__(self) -> None:
        self._given_total = self.total
        self._pipeline = Pipeline(self.window if self.tuner is None else self.tuner.window)
        self._began = time.perf_counter()

    def prepare(self) -> None:
        """Start or restart the reduction in the current group: nothing is sent or staged."""
        self.at = replace(self.at, rank=self.transport.rank, world=self.transport.world)
        self.total, self.agreed_step, self.first_nonfinite = self._given_total, None, ALL_FINITE
        self._staged, self.staged, self._left, self.rows, self.shortage = {}, [], [], {}, ""
        self._pipeline = Pipeline(self.window if self.tuner is None else self.tuner.window)

    def open(self, batch: int, warn: Callable[[Sequence[tuple[int, float]]], None]) -> None:
        """Compare first batches, and agree on the weight that counts as 1. Called once, before the first bucket.

        Part of the startup checks; its bytes do not count for any step.
        """
        received = run_script(gather_first_batches(batch, self.weight), self.transport).result
        weights = [remote for _, remote in received if remote > 0]
        if weights:
            self.reference = sum(weights) / len(weights)
            warn(received)

    def weigh(self, trained: Sequence[int], check: ParameterCheck) -> None:
        """All-gather weights and step counts before the first bucket. A compressor's state includes its own weight, so
        a mean could not be divided by another total afterwards; and all states must be of the same step.

        Args:
            trained: ranks that trained in the previous exchange, and know whether its average was used. Without any,
                since all of them have left, it counts as used, as the other ranks assume.
        """
        performed = run_script(gather_standings(self.weight, self.at.step), self.transport)
        self.spent.append(performed)
        standings: Standings = performed.result
        self.total = standings.weight
        ranks = trained or range(len(standings.steps))
        self.agreed_step = check.agree_on_steps({rank: standings.steps[rank] for rank in ranks})
        self.at = replace(self.at, step=self.agreed_step)

    @property
    def factor(self) -> float:
        """Factor for this worker's gradients before they are averaged."""
        if self.total is None:
            return self.weight / (self.reference or 1.0)
        return self.transport.world * self.weight / self.total if self.total else 0.0

    def correction(self, total: float) -> float:
        """Factor for the averages, once the total weight is known."""
        return 1.0 if self.total is not None else self.transport.world * (self.reference or 1.0) / total

    def exchange(self, bucket: Reducible, fresh: BucketInput, scale: float) -> None:
        """Start averaging one bucket in place."""
        self._leave(self._aggregation(bucket, fresh, scale))

    def average(self, flat: Tensor) -> Tensor:
        """Start averaging a tensor uncompressed; the weighted mean is written in place."""
        if self.kept is not None:
            self.kept.keep(-1 - len(self._left), flat)  # negative, unlike the places of buckets
        self._leave(_mean(flat, self.factor))
        return flat

    def close(self, bucket: Reducible, fresh: BucketInput, scale: float, trailer: StepTrailer) -> StepDecision:
        """Average the last bucket and complete all others. Returns the decision derived from all ranks' reports."""
        return self._close(self._aggregation(bucket, fresh, scale), trailer)

    def close_with_rows(self, gradients: Mapping[str, Rows], trailer: StepTrailer) -> StepDecision:
        """Average sparse gradients, which are complete only after backward, and complete all buckets."""
        return self._close(self._sparse_mean(gradients), trailer)

    def _close(self, closing: Script, trailer: StepTrailer) -> StepDecision:
        last = self._leave(coalesce([closing, self._conclude(trailer)]))
        self._pipeline.finish()
        if (tuner := self.tuner) is not None:
            # A rank without data may have waited for any time, so its duration is not used
            training = trailer.report.presence == Presence.TRAINING
            tuner.ended(time.perf_counter() - self._began if training else None)
            if tuner.over:
                run_script(tuner.compare(), self.transport)  # its bytes do not count for any step
        for each in self._left:
            self.spent.append(each.performed)
        for place in sorted(self._staged):
            self.staged.append(self._staged[place])
        _, decision = last.performed.result
        if not decision.alike:
            self._refuse_other_settings(trailer.settings, decision.active)
        if decision.short:
            self.shortage = "; ".join(filter(None, self.transport.all_gather_text(self.shortage)))
        if not decision.in_step:
            trailer.check.agree_on_steps(decision.steps)
        if decision.apart_in_data:
            trailer.check.note_apart_in_data(decision.apart_in_data)
        if decision.moved.any():
            moved = [group for group, has_moved in zip(trailer.buffers, decision.moved, strict=True) if has_moved]
            # By .data, which counts no version: a retained graph holds BatchNorm's statistics, but backward does not
            # read them
            traveling = [buffer.data for group in moved for buffer in group]
            self.spent.append(broadcast(self.transport, traveling, source=decision.active[0]))
        return decision  # type: ignore[no-any-return]

    def _refuse_other_settings(self, local: str, active: Sequence[int]) -> None:
        """Raise MismatchError on all ranks; in an elastic run only on new workers, if only theirs differ."""
        joined: bool | None = getattr(self.transport, "joined", None)
        answers = self.transport.all_gather_text(f"{bool(joined):d}{local}")
        texts = [text[1:] for text in answers]
        if joined is None:
            compare_settings(texts)
        refuse_newcomers(texts, [text[0] == "1" for text in answers], active, self.transport.rank)

    def _leave(self, script: Script) -> ScriptRun:
        flight_recorder.current.step = self.at.step + 1
        self._left.append(ScriptRun(script, self.transport, bucket=len(self._left) + 1))
        self._pipeline.put(self._left[-1])
        return self._left[-1]

    def _aggregation(self, bucket: Reducible, fresh: BucketInput, scale: float) -> Script:
        """The bucket's script, in units independent of the loss scale. Non-finite values are not sent."""
        try:
            place, out = len(self._left), bucket.mean_buffer  # a script starts when it is added to the pipeline
            if self.kept is None or not self.kept.restores(place, bucket.flat):
                fresh.put(bucket.flat)
            factor = self.factor / scale
            if self.kept is not None:
                if factor == 1.0 and out is not bucket.flat:
                    self.kept.trust(place)
                else:
                    self.kept.keep(place, bucket.flat)
            if factor != 1.0:
                bucket.flat.mul_(factor)

            def lost() -> None:
                self._note_nonfinite(nonfinite_tensor(bucket, bucket.flat))
                if self.kept is not None:
                    self.kept.keep(place, bucket.flat)  # before it is overwritten with zeros

            def short(failure: BaseException) -> None:
                self.first_nonfinite, self.shortage = SHORT_OF_MEMORY, shortage(bucket.packed, self.at.rank, failure)
                if self.kept is not None:
                    self.kept.keep(place, bucket.flat)

            sampler = self.sampler if self.sampler and self.weight and self.sampler.takes(bucket.layout) else None
            if sampler is not None and out is bucket.flat:
                out = torch.empty_like(out)  # the sampler needs the input
            meter, at = Metered(), replace(self.at, step=self.at.step - self.since)
            script = aggregate_finite(self.compressor, bucket.packed, bucket.state, at, out, lost, short)
            staged = yield from (script if sampler is None else meter.run(script, at))
            if sampler is not None and self.first_nonfinite == ALL_FINITE and staged.finite:
                sampler.measure(self.compressor, bucket.packed, staged, meter.nbytes, at)
            self._staged[place] = self.keep(staged)
        except (RuntimeError, MemoryError) as failure:
            if (explained := device_failure(bucket.packed, self.transport.rank, failure)) is None:
                raise
            raise explained from failure

    def _sparse_mean(self, gradients: Mapping[str, Rows]) -> Script:
        """Average rows. Non-finite values, and values with a sum that may overflow, are not sent."""
        own, world = {name: rows.scaled(self.factor) for name, rows in gradients.items()}, self.transport.world
        for name, rows in own.items():
            if not within_range(rows.values, world if rows.values.dtype.itemsize >= 4 else 1):
                self._note_nonfinite(name)
                own[name] = rows.none()
        self.rows = dict(zip(own, (yield from mean_rows(list(own.values()), world)), strict=True))

    def _note_nonfinite(self, name: str) -> None:
        if self.first_nonfinite == ALL_FINITE:
            self.first_nonfinite = self.names.index(name)

    def _conclude(self, trailer: StepTrailer) -> Generator[AllGather, Any, StepDecision]:
        """Exchange reports. It starts after the last bucket's encoder, so that the report includes its failures."""
        steps = trailer.report.steps if self.agreed_step is None else self.agreed_step
        found = replace(trailer.report, steps=steps, first_nonfinite=self.first_nonfinite, sample=trailer.sample())
        received = yield AllGather((encode(found),))
        return decide([text for (text,) in received], found)

    def blame(self, decision: StepDecision, reduced: Sequence[Reducible]) -> NonFiniteOrigin | None:
        """The rank and tensor with the first non-finite value, or None."""
        if decision.nonfinite:
            rank, place = decision.nonfinite[0]
            return rank, self.names[place]
        for each, staged in zip(reduced, self.staged, strict=True):
            if not staged.finite:
                return None, nonfinite_tensor(each, staged.mean)
        return None


def sum_costs(spent: Sequence[ScriptCost]) -> Mapping[str, float]:
    """Sum costs, by the field names of events.StepEnded."""
    found: dict[str, float] = {"encode_seconds": 0, "wire_seconds": 0, "decode_seconds": 0, "bytes_sent": 0}
    for each in spent:
        found["encode_seconds"] += each.encode_seconds
        found["wire_seconds"] += each.wire_seconds
        found["decode_seconds"] += each.decode_seconds
        found["bytes_sent"] += each.bytes_sent
    return found


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


@dataclass
class PendingReduction:
    """One step's reduction of gradients, controlled by the training thread: begin, send each bucket, wait, commit."""

    reduction: StepReduction
    buckets: Sequence[Bucket]
    sparse: SparseGradients
    comm_thread: CommThread
    taken: StepContext
    agree: Agreement = unchanged  # on non-finite values, with ranks that hold other parts of the model
    admits: bool = True  # whether new workers may be admitted before it
    sent: int = 0  # number of buckets sent
    committed: bool = False
    _transaction: Transaction | None = None  # if the group may change
    _work: list[Work[Any]] = field(default_factory=list)
    _before: list[Callable[[], object]] = field(default_factory=list)  # jobs to run before the next one

    def begin(
        self, warn: Callable[[Sequence[tuple[int, float]]], None], trained: Sequence[int], check: ParameterCheck
    ) -> None:
        """Run the exchanges that must precede the first bucket. trained: members that trained in the previous exchange;
        if some did not, they do not know whether its average was used."""
        if not self.comm_thread.is_fixed:
            self._transaction = self.comm_thread.transaction(admits=self.admits, prepare=self.reduction.prepare)
        if self.reduction.reference is None:
            self._submit(partial(self.reduction.open, self.taken.first_batch, warn))
        weigh = partial(self._weigh, trained, check)
        if self._is_weighed(trained):
            self._submit(weigh)
        elif not self.comm_thread.is_fixed:
            self._before.append(weigh)  # the group may change first; if it does not, no separate job is needed

    def _is_weighed(self, trained: Sequence[int]) -> bool:
        for bucket in self.buckets:
            if bucket.state:
                return True
        return set(trained) != set(self.comm_thread.members(self.reduction.transport.world))

    def _submit(self, part: Callable[[], Any], *, last: bool = False) -> Work[Any]:
        if self._before:
            before, self._before = self._before, []
            part = partial(_all, *before, part)
        job = part if self._transaction is None else partial(self._transaction.run, part, last=last)
        return self.comm_thread.submit(job)

    def _weigh(self, trained: Sequence[int], check: ParameterCheck) -> None:
        if not self._is_weighed(trained):
            return  # all ranks agree on this, since the group is known here
        step = self.reduction.at.step
        members = self.comm_thread.members(self.reduction.transport.world)
        self.reduction.weigh([rank for rank, member in enumerate(members) if member in trained], check)
        if self.reduction.at.step < step:
            for bucket in self.buckets:
                bucket.roll_back()

    def _scale_of(self, bucket: Bucket) -> float:
        """Loss scale to remove before compression: compressor state must not depend on it."""
        return (self.taken.scale or 1.0) if bucket.state else 1.0

    def send(self, fresh: BucketInput, trailer: StepTrailer | None) -> None:
        """Pass the next bucket to the communication thread; the last one carries this rank's report."""
        bucket = self.buckets[self.sent]
        scale = self._scale_of(bucket)
        job: Callable[[], Any] = partial(self.reduction.exchange, bucket, fresh, scale)
        if trailer is not None:
            job = partial(self.reduction.close, bucket, fresh, scale, trailer)
        self._work.append(self._submit(job, last=trailer is not None))
        self.sent += 1

    def send_rows(self, gradients: Mapping[str, Rows], trailer: StepTrailer) -> None:
        """Pass sparse gradients to the communication thread, after all buckets, with this rank's report."""
        self._work.append(self._submit(partial(self.reduction.close_with_rows, gradients, trailer), last=True))

    def wait(self) -> StepDecision:
        """Wait for the common decision of all ranks, after all buckets were sent."""
        decision: StepDecision
        for work in self._work:
            decision = work.wait()
        return decision

    def commit(self, decision: StepDecision) -> NonFiniteOrigin | None:
        """Assign the means to gradients and adopt the compressors' new state; or skip the step. Returns the rank and
        tensor with the first non-finite value, or None."""
        blame, weight = self.reduction.blame(decision, self.buckets), decision.weight
        if self.agree is not unchanged:
            blame = self.agree(blame)
        agreed = blame is None and not decision.short and decision.in_step
        self.committed = agreed and weight > 0 and bool(decision.active)
        if decision.short:
            self._withdraw()
            return blame
        skipped_by_scaler = (blame is not None or not decision.in_step) and self.taken.scale is not None
        used = {name for name, flag in zip(self.reduction.names, decision.used, strict=True) if flag}
        for bucket, staged in zip(self.buckets, self.reduction.staged, strict=True):
            if self.committed:
                correction = self.reduction.correction(weight) * self._scale_of(bucket)
                bucket.commit(staged.next_state, used, correction, staged.mean)
            elif skipped_by_scaler:
                bucket.flat.fill_(inf)  # signals the skipped step to a GradScaler
                bucket.point(used)
            else:
                bucket.point(set())  # optimizers skip missing gradients, but not zeros
        if self.reduction.kept is not None:
            self.reduction.kept.exchanged()
        if not self.sparse.parameters:
            return blame
        if self.committed:
            self.sparse.show(self.reduction.rows, used, self.reduction.correction(weight))
        elif skipped_by_scaler:
            self.sparse.show_infinite(used)
        else:
            self.sparse.clear()
        return blame

    def _withdraw(self) -> None:
        """Cancel the step on all ranks: gradients stay as they were, except for those in buckets, which are removed."""
        for bucket in self.buckets:
            bucket.withdraw()
        if self.reduction.kept is not None:
            self.reduction.kept.exchanged()


def _all(*jobs: Callable[[], Any]) -> Any:
    """Call all jobs; return the result of the last one."""
    *before, last = jobs
    for job in before:
        job()
    return last()
