"""Gradients leave as soon as they are there, and are averaged when backward returns.

A step is a transaction. Hooks hand full buckets to the lane while backward goes on; compressors stage what they would
remember; the step's last word tells every rank what happened on the others; then all of them commit, or none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.core import rng
from gossamer.errors import LayoutError, LoopError
from gossamer.reducer.accumulation import SUM, GradientAccumulator, kept_gradients
from gossamer.reducer.backward_hooks import refuse_reentrant
from gossamer.reducer.bucket import Bucket, copy_state, state_by_name
from gossamer.reducer.participation import refuse_to_save_apart
from gossamer.reducer.reduction import NO_INPUT, BucketInput, StepReduction, StepTrailer
from gossamer.reducer.step_report import NOBODY, Presence, StepDecision, StepReport
from gossamer.runtime.comm_thread import Work
from gossamer.runtime.pipeline_tuner import PipelineTuner
from gossamer.synchronizers.base import NamedState, NonFiniteOrigin, StepCosts, SyncContext, Synchronizer


@dataclass(frozen=True)
class ReductionOutcome:
    """How one exchange ended."""

    verdict: StepDecision
    committed: bool


class GradientSynchronizer(Synchronizer):
    """Averages the gradients in `buckets` over a transport's group, once per `accumulate` backward passes.

    averaged: the gradients are, and no optimizer step has used them; finished: an exchange, or a pass that only
    accumulated, took place since the last optimizer step; in_optimizer: such a step is going on.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        context: SyncContext,
        accumulate: int = 1,
    ) -> None:
        super().__init__()
        self._buckets, self._passes = buckets, 0
        self.in_optimizer = self.averaged = self.finished = False
        self._sums = GradientAccumulator(buckets, accumulate)
        self.names = [name for bucket in buckets for name in bucket.parameters]
        self._context, self._loop, self._transport = context, context.loop, context.transport
        self._pid = os.getpid()
        self._task: int | None = None
        self._round: StepReduction | None = None
        self._tuner = PipelineTuner()
        self._tickets: list[Work[Any]] = []
        self._versions = self._buffer_versions()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._ready, bucket, name))
            for bucket in buckets
            for name, parameter in bucket.parameters.items()
        ]

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    @property
    def passes(self) -> int:
        return self._passes

    @property
    def rank(self) -> int:
        """Among those who average here."""
        return self._transport.rank

    def tell_instead(
        self, ended: Callable[[bool, StepCosts], None], judged: Callable[[NonFiniteOrigin | None], None]
    ) -> None:
        """Steps that end here are part of what somebody else counts."""
        self._loop = replace(self._loop, ended=ended, judged=judged)

    # -- within backward -----------------------------------------------------------------------------------------------

    def _ready(self, bucket: Bucket, name: str, parameter: Tensor) -> None:
        """A gradient is complete. Runs once per parameter, so it does as little as it can."""
        if self.muted or (torch._C._current_graph_task_id() != self._task and not self._arm()):
            return
        bucket.missing.discard(name)
        if not bucket.missing and self._sums.complete:
            while (sent := len(self._tickets)) < len(self.buckets) and not self.buckets[sent].missing:
                self._launch(self.buckets[sent], Presence.TRAINING)

    def _arm(self) -> bool:
        """At the first gradient of a backward pass, ask to be called when it is over. False in a forked child."""
        if os.getpid() != self._pid:
            return False
        refuse_reentrant()
        if self._tickets:
            raise LoopError(
                "the backward pass before this one did not finish, and part of its gradients is on its way already, so "
                "the ranks are out of step. End the run and go on from the last checkpoint, as gossamer run "
                "--max-restarts 1 does by itself."
            )
        self._task = torch._C._current_graph_task_id()
        for bucket in self.buckets:
            bucket.missing = set(bucket.layout.names)
        if self._round is None and self._sums.complete:
            self._begin(
                self._sums.weight + self.weight
            )  # what must be known before the first bucket travels during backward
        torch.autograd.Variable._execution_engine.queue_callback(self._over)
        return True

    def _launch(self, bucket: Bucket, presence: Presence) -> None:
        """Hand a bucket to the lane; the last one takes this rank's report along."""
        training = presence == Presence.TRAINING
        round_ = self._round or self._begin(self._sums.weight + self.weight if training else 0.0)
        fresh = self._fresh(bucket) if training else NO_INPUT
        scale = self._scale_of(bucket)
        if bucket is self.buckets[-1]:
            self._submit(partial(round_.close, bucket, fresh, scale, self._closing(presence, round_.weight)))
        else:
            self._submit(partial(round_.exchange, bucket, fresh, scale))

    def _begin(self, weight: float) -> StepReduction:
        at = self._context.aggregation(self.step, self._loop.momentum())
        self._round = StepReduction(
            self._context.compressor, self._transport, self.names, at, self.reference, weight, tuner=self._tuner
        )
        if self.reference is None:
            self._context.comm_thread.submit(partial(self._round.open, self._loop.batch(), self._loop.warn))
        if any(bucket.state for bucket in self.buckets):
            self._context.comm_thread.submit(self._round.weigh)
        return self._round

    def _submit(self, job: Callable[[], Any]) -> None:
        self._tickets.append(self._context.comm_thread.submit(job))

    def _fresh(self, bucket: Bucket) -> BucketInput:
        """The gradients that do not lie in the bucket yet: zero_grad() took them out, as it does by default."""
        fresh: list[tuple[Tensor, Tensor]] = []
        held = False
        for name, parameter in bucket.parameters.items():
            gradient, view = parameter.grad, bucket.views[name]
            if gradient is view:
                held = True
            elif gradient is None:
                view.zero_()
            elif gradient.shape != view.shape or gradient.is_sparse:
                raise _unfit(name, view, gradient)
            else:
                fresh.append((view, gradient))
        if bucket.state and self.averaged and (self.in_optimizer or held):
            raise LoopError(
                "a second backward() before optimizer.step() would send what was averaged already once more, and "
                f"{self._context.compressor!r} would remember it wrongly. Accumulate with `with session.no_sync():` "
                "around all but the last backward(), or use Dense(). An optimizer that calls backward() within its "
                "step, such as LBFGS, needs Dense()."
            )
        return self._sums.join(self.buckets.index(bucket), fresh, self.weight, self._loop.scale() or 1.0)

    def _scale_of(self, bucket: Bucket) -> float:
        """The factor to take out of a bucket before it is compressed: what is remembered has no loss scale in it."""
        return (self._loop.scale() or 1.0) if bucket.state else 1.0

    def _closing(self, presence: Presence, weight: float) -> StepTrailer:
        training = presence == Presence.TRAINING
        now, settings = self._buffer_versions(), self._loop.settings()
        report = StepReport(
            weight=weight,
            presence=presence,
            settings=rng.address(settings),
            first_nonfinite=NOBODY,
            stop=self.asked_to_stop,
            used=np.array([name in self._sums.used or grad is not None for name, grad in self._gradients()]) & training,
            moved=np.array([new != old for new, old in zip(now, self._versions, strict=True)], dtype=bool) & training,
        )
        return StepTrailer(report=report, settings=settings, buffers=self._loop.buffers())

    def _gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        for bucket in self.buckets:
            for name, parameter in bucket.parameters.items():
                yield name, parameter.grad

    def _buffer_versions(self) -> list[tuple[tuple[int, int], ...]]:
        """By module: some of BatchNorm's buffers change without their version counters telling, others do tell."""
        return [tuple((id(buffer), buffer._version) for buffer in group) for group in self._loop.buffers()]

    # -- when backward is over -----------------------------------------------------------------------------------------

    def _over(self) -> None:
        if self._sums.complete:
            self.finish()
            return
        self._sums.add(self.weight, self._loop.scale() or 1.0)
        self._passes, self._task, self.finished = self._passes + 1, None, True
        self._expect()

    def _expect(self) -> None:
        for bucket in self.buckets:
            bucket.missing = set(bucket.layout.names)

    def finish(self, presence: Presence = Presence.TRAINING) -> ReductionOutcome:
        """Send what has not left, wait for everything, and commit or skip the step as all ranks together decide.

        A rank that is not training has no data and only keeps the others company.
        """
        for bucket in self.buckets[len(self._tickets) :]:
            if presence != Presence.TRAINING:
                bucket.flat.zero_()
            self._launch(bucket, presence)
        asked = time.perf_counter()
        *_, verdict = [ticket.wait() for ticket in self._tickets]
        if presence == Presence.TRAINING:
            self._sums.clear()
        waited = time.perf_counter() - asked
        return self._settle(verdict, waited)

    def _settle(self, verdict: StepDecision, waited: float) -> ReductionOutcome:
        assert self._round is not None
        done, self._round, self._task, self._tickets = self._round, None, None, []
        self.stopping = verdict.stop
        refuse_to_save_apart(verdict)
        blame = done.blame(verdict, self.buckets)
        committed = bool(verdict.active) and verdict.weight > 0 and blame is None
        scale = self._loop.scale()
        used = {name for name, someone in zip(self.names, verdict.used, strict=True) if someone}
        for bucket, staged in zip(self.buckets, done.staged, strict=True):
            if committed:
                correction = done.correction(verdict.weight) * self._scale_of(bucket)
                bucket.commit(staged.next_state, used, correction)
            elif blame and scale is not None:
                bucket.flat.fill_(inf)  # a GradScaler learns from it that the step was skipped
                bucket.point(used)
            else:
                bucket.point(set())  # optimizers do nothing without gradients, unlike with zeros
        self.reference = done.reference
        self.step += committed
        self._versions = self._buffer_versions()
        self._expect()
        if verdict.active:
            self.averaged, self.finished, self._passes = committed, True, self._passes + 1
            self._loop.ended(not committed, {"waiting_seconds": waited, **done.costs()})
            self._loop.judged(blame)
        return ReductionOutcome(verdict, committed)

    # -- around the optimizer, and the epoch ---------------------------------------------------------------------------

    def before_step(self, *, closure: bool) -> None:
        if not self.finished and not closure:
            self._over()  # no gradient hook fired here: the others wait for this rank
        self.in_optimizer = True

    def after_step(self) -> None:
        self.rest()

    def end_epoch(self) -> int:
        missed = 0
        while self.passes != self.until and (verdict := self.finish(Presence.OUT_OF_DATA).verdict).active:
            missed += 1
            if verdict.stop:
                return missed
        for bucket in self.buckets:
            bucket.point(set())
        self.rest()
        return missed

    def meet_to_save(self) -> None:
        with kept_gradients([p for bucket in self.buckets for p in bucket.parameters.values()]):
            self.finish(Presence.SAVING)  # ranks that go on training would not hear of it otherwise

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def remembered(self) -> NamedState:
        found = state_by_name(self.buckets)
        for name, total in self._sums.state():
            found.setdefault(name, {})[SUM] = total
        return found

    def progress(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "passes": self._passes,
            "reference": self.reference,
            "accumulated": self._sums.progress(),
        }

    def resume(self, progress: Mapping[str, Any], remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.step, self._passes, self.reference = progress["step"], progress["passes"], progress["reference"]
        self._sums.resume(progress["accumulated"])
        self.rest()
        copy_state(remembered, self.remembered())

    def begin_at(self, step: int) -> None:
        self.step = self._passes = step

    def adopt(self, before: Synchronizer) -> None:
        super().adopt(before)
        self._passes = before.passes

    @property
    def touched(self) -> bool:
        """Whether anybody wrote to the averaged gradients."""
        return any(bucket.touched for bucket in self.buckets)

    def rest(self) -> None:
        """The optimizer has made its step, or never will: what comes next is a new one."""
        self.averaged = self.finished = self.in_optimizer = False

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _unfit(name: str, view: Tensor, gradient: Tensor) -> Exception:
    if gradient.layout != torch.strided:
        return LoopError(f'"{name}" has a sparse gradient, which buckets cannot hold: build it with sparse=False.')
    return LayoutError(
        f'"{name}" was {tuple(view.shape)} at attach and is {tuple(gradient.shape)} now, so what is remembered '
        f'about it no longer means anything. Call session.reset("{name}") after resizing.'
    )
