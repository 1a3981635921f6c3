"""Reduction: averages all buckets of a step over the ranks, as one transaction.

StepReduction runs on the communication thread. PendingReduction is the same step as the training thread sees it.
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
from gossamer.base.coalesce import coalesce
from gossamer.base.kernels import within_range
from gossamer.base.layout import FlatTensors, Layout, Slot, first_nonfinite
from gossamer.base.ops import AllGather, AllReduceMean, Script
from gossamer.base.runner import ScriptCost, ScriptRun, broadcast, run_script
from gossamer.base.transport import Transport
from gossamer.comm.runtime.comm_thread import CommThread, Work
from gossamer.comm.runtime.pipeline import DEPTH, Pipeline, PipelineTuner
from gossamer.comm.runtime.transaction import Transaction
from gossamer.train.engine.bucket import Bucket, BucketInput, KeptInputs
from gossamer.train.engine.device_failures import named, shortage
from gossamer.train.engine.loop import StepContext
from gossamer.train.engine.parameter_check import ParameterCheck
from gossamer.train.engine.report import (
    NOBODY,
    SHORT_OF_MEMORY,
    Agreement,
    NonFiniteOrigin,
    Presence,
    Standings,
    StepDecision,
    StepReport,
    compare_settings,
    exchange_reports,
    gather_first_batches,
    gather_standings,
    refuse_newcomers,
    unchanged,
)
from gossamer.train.engine.sparse_gradients import Rows, SparseGradients, mean_rows
from gossamer.train.engine.tensor_sampler import Metered, TensorSampler


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
        """Where the mean may be written: over the input, or apart from it; None where it belongs into new memory."""


def without_own(staged: AggregationResult) -> AggregationResult:
    """Without this worker's own contribution, which is as large as the bucket and will not be needed."""
    mean = staged.mean
    return replace(staged, own_contribution=lambda: mean, owes=None)


def with_own(staged: AggregationResult) -> AggregationResult:
    """With this worker's own contribution, computed while it can be."""
    own = staged.own
    return replace(staged, own_contribution=lambda: own, owes=None)


def unsampled() -> int:
    """The checksum of a report in which no parameters are compared."""
    return 0


@dataclass(frozen=True, kw_only=True)
class StepTrailer:
    """Goes with the last bucket of a step."""

    report: StepReport
    settings: str  # the optimizer's, told where they are not alike
    check: ParameterCheck
    buffers: Sequence[Sequence[Tensor]]  # the model's, by module; those that moved are broadcast
    sample: Callable[[], int] = unsampled  # the report's, asked for on the communication thread, which may wait for it


@dataclass
class StepReduction:
    """Reduces buckets one after the other; the last one takes along what every rank must know before it commits.

    Its methods run on the communication thread. A bucket's second operation travels beside the first ones of later
    buckets, in an order that is the same on every rank (Pipeline). So the means are there after `close`, not before.
    """

    compressor: Compressor
    transport: Transport
    names: Sequence[str]  # of all parameters, in the buckets' order; those of sparse gradients at the end
    at: AggregationContext
    reference: float | None  # the weight that counts as one; agreed upon in the very first reduction
    weight: float  # this worker's
    total: float | None = None  # all workers', where it had to be known before anything was compressed
    keep: Callable[[AggregationResult], AggregationResult] = without_own  # the part of results kept until commit
    window: int = DEPTH  # of the pipeline
    tuner: PipelineTuner | None = None  # chooses the window instead, over all reductions of a synchronizer
    kept: KeptInputs | None = None  # what went in, where the group may change meanwhile
    sampler: TensorSampler | None = None  # measures what tensors cost
    spent: list[ScriptCost] = field(default_factory=list)
    since: int = 0  # the step from which compressors count
    agreed_step: int | None = None  # the step that all ranks make, where it had to be known before anything left
    first_nonfinite: int = NOBODY  # the place of the first tensor that was not finite here, or SHORT_OF_MEMORY
    shortage: str = ""  # where memory ran out here; after `close`, where it did on some ranks
    rows: Mapping[str, Rows] = field(default_factory=dict)  # means of sparse gradients, after `close_with_rows`
    staged: list[AggregationResult] = field(init=False, default_factory=list)  # by bucket, after `close`
    _staged: dict[int, AggregationResult] = field(init=False, default_factory=dict)  # by the bucket's place
    _left: list[ScriptRun] = field(init=False, default_factory=list)
    _pipeline: Pipeline = field(init=False)
    _began: float = field(init=False)
    _given_total: float | None = field(init=False)

    def __post_init__(self) -> None:
        self._given_total = self.total
        self._pipeline = Pipeline(self.window if self.tuner is None else self.tuner.window)
        self._began = time.perf_counter()

    def prepare(self) -> None:
        """The reduction begins, or begins again, in the group as it is now: nothing has left, and nothing is staged."""
        self.at = replace(self.at, rank=self.transport.rank, world=self.transport.world)
        self.total, self.agreed_step, self.first_nonfinite = self._given_total, None, NOBODY
        self._staged, self.staged, self._left, self.rows, self.shortage = {}, [], [], {}, ""
        self._pipeline = Pipeline(self.window if self.tuner is None else self.tuner.window)

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
        if self.kept is not None:
            self.kept.keep(-1 - len(self._left), flat)  # no bucket's place
        self._leave(_mean(flat, self.factor))
        return flat

    def close(self, bucket: Reducible, fresh: BucketInput, scale: float, trailer: StepTrailer) -> StepDecision:
        """Average the last bucket and finish all before it; the decision from all ranks' reports."""
        return self._close(self._aggregation(bucket, fresh, scale), trailer)

    def close_with_rows(self, gradients: Mapping[str, Rows], trailer: StepTrailer) -> StepDecision:
        """Average sparse gradients, which are whole at the end only, and finish all buckets."""
        return self._close(self._sparse_mean(gradients), trailer)

    def _close(self, closing: Script, trailer: StepTrailer) -> StepDecision:
        last = self._leave(coalesce([closing, self._conclude(trailer)]))
        self._pipeline.finish()
        if self.tuner is not None:
            self._try(self.tuner, trailer.report.presence)
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
            traveling = [buffer for group in moved for buffer in group]
            self.spent.append(broadcast(self.transport, traveling, source=decision.active[0]))
        return decision  # type: ignore[no-any-return]

    def _refuse_other_settings(self, mine: str, active: Sequence[int]) -> None:
        """Raise MismatchError on all ranks; where members come and go, on newcomers alone if they are the others."""
        joined: bool | None = getattr(self.transport, "joined", None)
        told = self.transport.all_gather_text(f"{bool(joined):d}{mine}")
        texts = [text[1:] for text in told]
        if joined is None:
            compare_settings(texts)
        refuse_newcomers(texts, [text[0] == "1" for text in told], active, self.transport.rank)

    def _try(self, tuner: PipelineTuner, presence: Presence) -> None:
        """Note what this reduction took; ranks compare once a trial is over. No part of any step's bytes.

        A rank without data began to wait at any time, so its seconds say nothing.
        """
        tuner.ended(time.perf_counter() - self._began if presence == Presence.TRAINING else None)
        if tuner.over:
            run_script(tuner.compare(), self.transport)

    def _leave(self, script: Script) -> ScriptRun:
        flight_recorder.current.step = self.at.step + 1
        self._left.append(ScriptRun(script, self.transport, bucket=len(self._left) + 1))
        self._pipeline.put(self._left[-1])
        return self._left[-1]

    def _aggregation(self, bucket: Reducible, fresh: BucketInput, scale: float) -> Script:
        """The bucket's script, in units that do not change when the loss scale does. Nothing infinite is sent."""
        with named(bucket.packed, self.transport.rank):  # what fails on the device does so over this bucket
            place, out = len(self._left), bucket.mean_buffer  # a script begins as soon as it is put in
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
                    self.kept.keep(place, bucket.flat)  # zeros are going to be written over it

            def short(failure: BaseException) -> None:
                self.first_nonfinite, self.shortage = SHORT_OF_MEMORY, shortage(bucket.packed, self.at.rank, failure)
                if self.kept is not None:
                    self.kept.keep(place, bucket.flat)

            sampler = self.sampler if self.sampler and self.weight and self.sampler.takes(bucket.layout) else None
            if sampler is not None and out is bucket.flat:
                out = torch.empty_like(out)  # what went in is to be measured
            meter, at = Metered(), replace(self.at, step=self.at.step - self.since)
            script = aggregate_finite(self.compressor, bucket.packed, bucket.state, at, out, lost, short)
            staged = yield from (script if sampler is None else meter.run(script, at))
            if sampler is not None and self.first_nonfinite == NOBODY and staged.finite:
                sampler.measure(self.compressor, bucket.packed, staged, meter.nbytes, at)
            self._staged[place] = self.keep(staged)

    def _sparse_mean(self, gradients: Mapping[str, Rows]) -> Script:
        """Nothing infinite is sent here either, nor anything whose sum might be."""
        own, world = {name: rows.scaled(self.factor) for name, rows in gradients.items()}, self.transport.world
        for name, rows in own.items():
            if not within_range(rows.values, world if rows.values.dtype.itemsize >= 4 else 1):
                self._note_nonfinite(name)
                own[name] = rows.none()
        self.rows = dict(zip(own, (yield from mean_rows(list(own.values()), world)), strict=True))

    def _note_nonfinite(self, name: str) -> None:
        if self.first_nonfinite == NOBODY:
            self.first_nonfinite = self.names.index(name)

    def _conclude(self, trailer: StepTrailer) -> Generator[AllGather, Any, StepDecision]:
        """Begins after the last bucket's encoder, so that the report tells what that one found."""
        steps = trailer.report.steps if self.agreed_step is None else self.agreed_step
        found = replace(trailer.report, steps=steps, first_nonfinite=self.first_nonfinite, sample=trailer.sample())
        return (yield from exchange_reports(found))

    def blame(self, decision: StepDecision, reduced: Sequence[Reducible]) -> NonFiniteOrigin | None:
        """The rank and tensor whose number was not finite; None where all were."""
        if decision.nonfinite:
            rank, place = decision.nonfinite[0]
            return rank, self.names[place]
        for each, staged in zip(reduced, self.staged, strict=True):
            if not staged.finite:
                return None, nonfinite_tensor(each, staged.mean)
        return None


def sum_costs(spent: Sequence[ScriptCost]) -> Mapping[str, float]:
    """By the names of events.StepEnded."""
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
    """One step's reduction of gradients as the training thread sees it: begin, send each bucket, wait, commit."""

    reduction: StepReduction
    buckets: Sequence[Bucket]
    sparse: SparseGradients
    comm_thread: CommThread
    taken: StepContext
    agree: Agreement = unchanged  # on what was not finite, with ranks that hold other parts of the model
    admits: bool = True  # whether newcomers may be let in before it
    sent: int = 0  # how many buckets have left
    committed: bool = False
    _transaction: Transaction | None = None  # where the group may change meanwhile
    _work: list[Work[Any]] = field(default_factory=list)
    _before: list[Callable[[], object]] = field(default_factory=list)  # what the next job begins with

    def __post_init__(self) -> None:
        if not self.comm_thread.is_fixed:
            self._transaction = self.comm_thread.transaction(admits=self.admits, prepare=self.reduction.prepare)

    def begin(
        self, warn: Callable[[Sequence[tuple[int, float]]], None], trained: Sequence[int], check: ParameterCheck
    ) -> None:
        """Find out what must be known before the first bucket leaves. trained: the members that did in the exchange
        before; where those were not all, the others do not know whether its averages were used."""
        if self.reduction.reference is None:
            self._submit(partial(self.reduction.open, self.taken.first_batch, warn))
        weigh = partial(self._weigh, trained, check)
        if self._is_weighed(trained):
            self._submit(weigh)
        elif not self.comm_thread.is_fixed:
            self._before.append(weigh)  # the group may be another by then; where it is not, no job is spent on it

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
            return  # as all ranks find, now that the group is known
        step = self.reduction.at.step
        members = self.comm_thread.members(self.reduction.transport.world)
        self.reduction.weigh([rank for rank, member in enumerate(members) if member in trained], check)
        if self.reduction.at.step < step:
            for bucket in self.buckets:
                bucket.roll_back()

    def _scale_of(self, bucket: Bucket) -> float:
        """The factor to take out of a bucket before it is compressed: what is remembered has no loss scale in it."""
        return (self.taken.scale or 1.0) if bucket.state else 1.0

    def send(self, fresh: BucketInput, trailer: StepTrailer | None) -> None:
        """Hand the next bucket to the communication thread; the last one takes this rank's report along."""
        bucket = self.buckets[self.sent]
        scale = self._scale_of(bucket)
        job: Callable[[], Any] = partial(self.reduction.exchange, bucket, fresh, scale)
        if trailer is not None:
            job = partial(self.reduction.close, bucket, fresh, scale, trailer)
        self._work.append(self._submit(job, last=trailer is not None))
        self.sent += 1

    def send_rows(self, gradients: Mapping[str, Rows], trailer: StepTrailer) -> None:
        """Hand sparse gradients to the communication thread, after all buckets, with this rank's report."""
        self._work.append(self._submit(partial(self.reduction.close_with_rows, gradients, trailer), last=True))

    def wait(self) -> StepDecision:
        """Once all buckets were sent: what all ranks decided together."""
        decision: StepDecision
        for work in self._work:
            decision = work.wait()
        return decision

    def commit(self, decision: StepDecision) -> NonFiniteOrigin | None:
        """Show the optimizer the means and remember what compressors remember; or skip the step, and return what was
        not finite."""
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
                bucket.flat.fill_(inf)  # a GradScaler learns from it that the step was skipped
                bucket.point(used)
            else:
                bucket.point(set())  # optimizers do nothing without gradients, unlike with zeros
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
        """Nobody makes the step: gradients are as they were, but for those that lie in buckets, which are gone."""
        for bucket in self.buckets:
            bucket.withdraw()
        if self.reduction.kept is not None:
            self.reduction.kept.exchanged()


def _all(*jobs: Callable[[], Any]) -> Any:
    """What the last one returns."""
    *before, last = jobs
    for job in before:
        job()
    return last()
