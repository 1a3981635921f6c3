"""Gradient synchronizer: averages gradients, which leave as soon as they are there, when backward returns.

A step is a transaction. Hooks hand full buckets to the communication thread while backward goes on; compressors stage
what they would remember; the step's last operation tells every rank what happened on the others; then all of them
commit, or none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.core import rng
from gossamer.errors import LoopError
from gossamer.events import notice
from gossamer.reducer.accumulation import SUM, GradientAccumulator, kept_gradients
from gossamer.reducer.backward_hooks import refuse_reentrant
from gossamer.reducer.bucket import Bucket, copy_state
from gossamer.reducer.model_buffers import BufferVersions
from gossamer.reducer.participation import refuse_apart
from gossamer.reducer.reduction import NO_INPUT, BucketInput, PendingReduction, StepReduction, StepTrailer
from gossamer.reducer.step_report import NOBODY, Presence, StepDecision, StepReport
from gossamer.runtime.pipeline_tuner import PipelineTuner
from gossamer.synchronizers.base import LoopControls, NamedState, SyncContext, Synchronizer

MANY_DROPPED = 10


class GradientPhase(Enum):
    """What became of the gradients since the last step of the optimizer."""

    WAITING = auto()  # nothing yet
    FINISHED = auto()  # a pass was accumulated, or its reduction skipped
    AVERAGED = auto()  # they are the mean, and no optimizer step has used them


class GradientSynchronizer(Synchronizer):
    """Averages the gradients in `buckets` over a transport's group, once per `accumulate` backward passes."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        context: SyncContext,
        accumulate: int = 1,
        controls: LoopControls | None = None,
    ) -> None:
        super().__init__(controls)
        self._buckets, self._passes = buckets, 0
        self.phase, self.in_optimizer = GradientPhase.WAITING, False
        self._sums = GradientAccumulator(buckets, accumulate)
        self.names = [name for bucket in buckets for name in bucket.parameters]
        self._context, self._loop, self._pid = context, context.loop, os.getpid()
        self._task: int | None = None
        self._pending: PendingReduction | None = None
        self._tuner = PipelineTuner()
        self._versions = BufferVersions(context.loop.buffers)
        self._unused = False  # the last average: no optimizer has used it yet
        self._dropped = 0  # averages in a row that no optimizer used
        self._seen: list[int] = []  # versions of some parameters when that average was shown
        self._trained: Sequence[int] = range(context.transport.world)  # who did in the exchange before
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

    # -- within backward -----------------------------------------------------------------------------------------------

    def _ready(self, bucket: Bucket, name: str, parameter: Tensor) -> None:
        """A gradient is complete. Runs once per parameter, so it does as little as it can."""
        if self.controls.muted or (torch._C._current_graph_task_id() != self._task and not self._arm()):
            return
        bucket.missing.discard(name)
        if not bucket.missing and self._pending is not None:
            while (sent := self._pending.sent) < len(self._buckets) and not self._buckets[sent].missing:
                self._send(self._pending, Presence.TRAINING)

    def _arm(self) -> bool:
        """At the first gradient of a backward pass, ask to be called when it is over. False in a forked child."""
        if os.getpid() != self._pid:
            return False
        refuse_reentrant()
        if self._pending is not None and self._pending.sent:
            raise LoopError(
                "the backward pass before this one did not finish, and part of its gradients is on its way already, so "
                "the ranks are out of step. End the run and go on from the last checkpoint, as gossamer run "
                "--max-restarts 1 does by itself."
            )
        self._task = torch._C._current_graph_task_id()
        self._expect_all()
        self._drop_thrown_away()
        if self._sums.complete:
            self._begin(self._sums.weight + self.controls.weight)
        torch.autograd.Variable._execution_engine.queue_callback(self._over)
        return True

    def _begin(self, weight: float) -> PendingReduction:
        """See the loop as it is now; what must be known before the first bucket travels during backward."""
        taken = self._loop.step_context()
        if self._pending is not None:
            self._pending.taken = taken
            return self._pending
        at = self._context.aggregation(self.step, taken.momentum)
        compressor, transport = self._context.compressor, self._context.transport
        reduction = StepReduction(compressor, transport, self.names, at, self.reference, weight, tuner=self._tuner)
        self._pending = PendingReduction(reduction, self._buckets, self._context.comm_thread, taken)
        self._pending.begin(self._loop.warn, self._trained, self._loop.check())
        return self._pending

    def _send(self, pending: PendingReduction, presence: Presence) -> None:
        """Let the next bucket leave; the last one takes this rank's report along."""
        bucket = self._buckets[pending.sent]
        fresh = self._input(pending, bucket) if presence == Presence.TRAINING else NO_INPUT
        pending.send(fresh, self._trailer(pending, presence) if bucket is self._buckets[-1] else None)

    def _input(self, pending: PendingReduction, bucket: Bucket) -> BucketInput:
        new, held = bucket.new_gradients()
        if bucket.state and self.phase is GradientPhase.AVERAGED and (self.in_optimizer or held):
            raise LoopError(
                "a second backward() before optimizer.step() would send what was averaged already once more, and "
                f"{self._context.compressor!r} would remember it wrongly. Accumulate with `with session.no_sync():` "
                "around all but the last backward(), or use Dense(). Gradients that nobody is to use, as those of a "
                "GAN's generator for its discriminator, are thrown away by zero_grad() before the next backward(). An "
                "optimizer that calls backward() within its step, such as LBFGS, needs Dense()."
            )
        return self._sums.join(self._buckets.index(bucket), new, self.controls.weight, pending.taken.scale or 1.0)

    def _trailer(self, pending: PendingReduction, presence: Presence) -> StepTrailer:
        training, check = presence == Presence.TRAINING, self._loop.check()
        report = StepReport(
            weight=pending.reduction.weight,
            presence=presence,
            settings=rng.address(pending.taken.settings),
            steps=self.step,
            sample=check.sample(self.step) if training else 0,
            first_nonfinite=NOBODY,
            stop=self.asked_to_stop,
            used=np.array([name in self._sums.used or grad is not None for name, grad in self._gradients()]) & training,
            moved=self._versions.moved() & training,
        )
        return StepTrailer(report=report, settings=pending.taken.settings, check=check, buffers=self._loop.buffers())

    def _gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        for bucket in self._buckets:
            for name, parameter in bucket.parameters.items():
                yield name, parameter.grad

    # -- when backward is over -----------------------------------------------------------------------------------------

    def _over(self) -> None:
        if self._sums.complete:
            self.finish()
            return
        self._sums.add(self.controls.weight, self._loop.scale() or 1.0)
        self._passes, self._task = self._passes + 1, None
        if self.phase is GradientPhase.WAITING:
            self.phase = GradientPhase.FINISHED
        self._expect_all()

    def _expect_all(self) -> None:
        for bucket in self._buckets:
            bucket.missing = set(bucket.layout.names)

    def finish(self, presence: Presence = Presence.TRAINING) -> StepDecision:
        """Send what has not left, wait for everything, and commit or skip the step as all ranks together decide.

        A rank that is not training has no data and only takes part in the others' operations.
        """
        training = presence == Presence.TRAINING
        pending = self._pending or self._begin(self._sums.weight + self.controls.weight if training else 0.0)
        for bucket in self._buckets[pending.sent :]:
            if not training:
                bucket.flat.zero_()
            self._send(pending, presence)
        asked = time.perf_counter()
        decision = pending.wait()
        if training:
            self._sums.clear()
        waited = time.perf_counter() - asked
        return self._settle(pending, decision, waited)

    def _settle(self, pending: PendingReduction, decision: StepDecision, waited: float) -> StepDecision:
        self._pending = self._task = None
        self.stopping = decision.stop
        refuse_apart(decision.presences)
        if decision.parted:
            self._context.compare_parameters(decision.parted, self.step)
        blame = pending.commit(decision)
        self.reference = pending.reduction.reference
        if decision.presences[self._context.transport.rank] == Presence.OUT_OF_DATA:
            self._passes -= pending.reduction.at.step < self.step  # nobody has used the last average, as the others say
            self._unused = False
        self.step = max(pending.reduction.at.step, *decision.steps.values(), 0) + pending.committed
        self._versions.note()
        self._expect_all()
        if decision.active:
            self._trained = decision.active
            self._unused = pending.committed and not self.in_optimizer
            self._seen = self._parameter_versions()
            self.phase = GradientPhase.AVERAGED if pending.committed else GradientPhase.FINISHED
            self._passes += 1
            self._loop.ended(not pending.committed, {"waiting_seconds": waited, **pending.reduction.costs()})
            self._loop.judged(blame)
        return decision

    # -- averages that no optimizer uses -------------------------------------------------------------------------------

    def use(self) -> None:
        self._unused, self._dropped = False, 0

    def _drop_thrown_away(self) -> None:
        """Another pass begins. Where no optimizer has used the last average and its gradients are not there any more,
        that pass was none: the generator's through a GAN's discriminator, a saliency map, a batch that is left out."""
        if not self._unused:
            return
        if self._seen != self._parameter_versions():
            self.use()  # by hand, without an optimizer
        elif all(bucket.zeroed for bucket in self._buckets) or not any(
            parameter.grad is bucket.views[name] for bucket, name, parameter in self._all()
        ):  # else this pass accumulates upon it
            self._drop_unused()

    def _drop_unused(self) -> None:
        """Take back what compressors remember of the last average, if no optimizer has used it: its remainder would be
        sent along with the next."""
        if not self._unused:
            return
        for bucket in self._buckets:
            bucket.roll_back()
        self.step, self._passes, self._dropped = self.step - 1, self._passes - 1, self._dropped + 1
        self._unused = False
        self.rest()
        if self._dropped == MANY_DROPPED and self._context.transport.rank == 0:
            notice(
                f"{MANY_DROPPED} backward passes in a row were averaged and no optimizer has used any of them, so they "
                "left no trace. Call optimizer.step(); where parameters are updated by hand, write into them with "
                "`with torch.no_grad(): parameter.sub_(...)` and not through parameter.data, which nobody sees."
            )

    def _all(self) -> Iterator[tuple[Bucket, str, Parameter]]:
        for bucket in self._buckets:
            for name, parameter in bucket.parameters.items():
                yield bucket, name, parameter

    def _parameter_versions(self) -> list[int]:
        """Of the first parameter of every bucket: counts how often it was written to."""
        return [next(iter(bucket.parameters.values()))._version for bucket in self._buckets]

    # -- around the optimizer, and the epoch ---------------------------------------------------------------------------

    def before_step(self, *, closure: bool) -> None:
        if self.phase is GradientPhase.WAITING and not closure:
            if all(
                parameter.grad is None or parameter.grad is bucket.views[name]
                for bucket, name, parameter in self._all()
            ):
                self._loop.check().note_missing_pass()
            self._over()  # no gradient hook fired here: the others wait for this rank
        self.in_optimizer = True
        self.use()

    def after_step(self) -> None:
        self.rest()

    def step_skipped(self) -> None:
        self.rest()

    def end_epoch(self) -> int:
        self._drop_unused()
        missed = 0
        while self.passes != self.last_pass and (decision := self.finish(Presence.OUT_OF_DATA)).active:
            missed += 1
            if decision.stop:
                return missed
        for bucket in self._buckets:
            bucket.point(set())
        self.rest()
        return missed

    def meet_to_save(self) -> None:
        with kept_gradients([p for bucket in self._buckets for p in bucket.parameters.values()]):
            if self._unused:
                for bucket in self._buckets:
                    bucket.keep_before()
            self.finish(Presence.SAVING)  # ranks that train on would not hear of it otherwise

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def remembered(self) -> NamedState:
        found: NamedState = {}
        for bucket in self._buckets:
            found |= bucket.state_by_name(rolled_back=self._unused)
        for name, total in self._sums.state():
            found.setdefault(name, {})[SUM] = total
        return found

    def progress(self) -> dict[str, Any]:
        return {
            "step": self.step - self._unused,
            "passes": self._passes - self._unused,
            "reference": self.reference,
            "accumulated": self._sums.progress(),
        }

    def resume(self, progress: Mapping[str, Any], remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.step, self._passes, self.reference = progress["step"], progress["passes"], progress["reference"]
        self._sums.resume(progress["accumulated"])
        self._unused, self._trained = False, range(self._context.transport.world)
        self.rest()
        copy_state(remembered, self.remembered())

    def begin_at(self, step: int) -> None:
        self.step = self._passes = step

    def take_over_from(self, before: Synchronizer) -> None:
        super().take_over_from(before)
        self._passes = before.passes

    @property
    def touched(self) -> bool:
        """Whether the averaged gradients were written to."""
        return any(bucket.touched for bucket in self._buckets)

    def rest(self) -> None:
        """What comes next is a new step."""
        self.phase, self.in_optimizer = GradientPhase.WAITING, False

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
