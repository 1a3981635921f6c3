"""Pending reduction: one step's reduction of gradients as the training thread sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

from gossamer.base.aggregation import Moments
from gossamer.comm.runtime.comm_thread import CommThread, Work
from gossamer.comm.runtime.transaction import Transaction
from gossamer.train.reducer.bucket import Bucket
from gossamer.train.reducer.device_failures import undone
from gossamer.train.reducer.parameter_check import ParameterCheck
from gossamer.train.reducer.reduction import BucketInput, StepReduction, StepTrailer
from gossamer.train.reducer.sparse_gradients import Rows, SparseGradients
from gossamer.train.reducer.step_report import Agreement, NonFiniteOrigin, StepDecision, unchanged


@dataclass(frozen=True)
class StepContext:
    """The training loop at the first gradient of a backward pass."""

    scale: float | None  # the factor that a GradScaler put into the gradients, None without one
    settings: str  # the optimizer's hyperparameters
    moments: Moments  # what the compressor applies of the optimizer's
    first_batch: int  # a hash of this rank's
    agree: Agreement = unchanged  # on what was not finite, with ranks that hold other parts of the model

    def scale_of(self, bucket: Bucket) -> float:
        """The factor to take out of a bucket before it is compressed: what is remembered has no loss scale in it."""
        return (self.scale or 1.0) if bucket.state else 1.0


@dataclass
class PendingReduction:
    """One step's reduction of gradients as the training thread sees it: begin, send each bucket, wait, commit."""

    reduction: StepReduction
    buckets: Sequence[Bucket]
    sparse: SparseGradients
    comm_thread: CommThread
    taken: StepContext
    admits: bool = True  # whether newcomers may be let in before it
    sent: int = 0  # how many buckets have left
    committed: bool = False
    _transaction: Transaction = field(init=False)
    _work: list[Work[Any]] = field(default_factory=list)
    _before: list[Callable[[], object]] = field(default_factory=list)  # what the next job begins with

    def __post_init__(self) -> None:
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
        return any(bucket.state for bucket in self.buckets) or set(trained) != set(self._members)

    @property
    def _members(self) -> Sequence[int]:
        return self.comm_thread.members(self.reduction.transport.world)

    def _submit(self, part: Callable[[], Any], *, last: bool = False) -> Work[Any]:
        before, self._before = self._before, []
        return self.comm_thread.submit(partial(self._transaction.run, partial(_all, *before, part), last=last))

    def _weigh(self, trained: Sequence[int], check: ParameterCheck) -> None:
        if not self._is_weighed(trained):
            return  # as all ranks find, now that the group is known
        step = self.reduction.at.step
        self.reduction.weigh([rank for rank, member in enumerate(self._members) if member in trained], check)
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
        self._work.append(self._submit(job, last=trailer is not None))
        self.sent += 1

    def send_rows(self, gradients: Mapping[str, Rows], trailer: StepTrailer) -> None:
        """Hand sparse gradients to the communication thread, after all buckets, with this rank's report."""
        self._work.append(self._submit(partial(self.reduction.close_with_rows, gradients, trailer), last=True))

    def wait(self) -> StepDecision:
        """Once all buckets were sent: what all ranks decided together."""
        *_, decision = [work.wait() for work in self._work]
        return decision  # type: ignore[no-any-return]

    def commit(self, decision: StepDecision) -> NonFiniteOrigin | None:
        """Show the optimizer the means and remember what compressors remember; or skip the step, and return what was
        not finite."""
        blame, weight = self.taken.agree(self.reduction.blame(decision, self.buckets)), decision.weight
        agreed = blame is None and not decision.short and decision.in_step
        self.committed = agreed and weight > 0 and bool(decision.active)
        if decision.short:
            self._withdraw()
            return blame
        skipped_by_scaler = (blame is not None or not decision.in_step) and self.taken.scale is not None
        used = {name for name, flag in zip(self.reduction.names, decision.used, strict=True) if flag}
        for bucket, staged in zip(self.buckets, self.reduction.staged, strict=True):
            if self.committed:
                correction = self.reduction.correction(weight) * self.taken.scale_of(bucket)
                bucket.commit(staged.next_state, used, correction, staged.mean)
            elif skipped_by_scaler:
                bucket.flat.fill_(inf)  # a GradScaler learns from it that the step was skipped
                bucket.point(used)
            else:
                bucket.point(set())  # optimizers do nothing without gradients, unlike with zeros
            bucket.exchanged()
        if self.committed:
            self.sparse.show(self.reduction.rows, used, self.reduction.correction(weight))
        elif skipped_by_scaler:
            self.sparse.show_infinite(used)
        else:
            self.sparse.clear()
        return blame

    def refuse_shortage(self) -> None:
        """Raise MemoryShortage, on every rank, where memory ran out on some."""
        if self.reduction.shortage:
            raise undone(self.reduction.shortage)

    def _withdraw(self) -> None:
        """Nobody makes the step: gradients are as they were, but for those that lie in buckets, which are gone."""
        for bucket in self.buckets:
            bucket.withdraw()
            bucket.exchanged()


def _all(*jobs: Callable[[], Any]) -> Any:
    """What the last one returns."""
    *before, last = jobs
    for job in before:
        job()
    return last()
