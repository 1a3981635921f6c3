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

from gossamer.core import rng
from gossamer.errors import LoopError
from gossamer.reducer.accumulation import SUM, GradientAccumulator, kept_gradients
from gossamer.reducer.backward_hooks import refuse_reentrant
from gossamer.reducer.bucket import Bucket, copy_state, state_by_name
from gossamer.reducer.model_buffers import BufferVersions
from gossamer.reducer.participation import refuse_to_save_apart
from gossamer.reducer.reduction import NO_INPUT, BucketInput, PendingReduction, StepReduction, StepTrailer
from gossamer.reducer.step_report import NOBODY, Presence, StepDecision, StepReport
from gossamer.runtime.pipeline_tuner import PipelineTuner
from gossamer.synchronizers.base import LoopControls, NamedState, SyncContext, Synchronizer


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
        if self._sums.complete:
            self._begin(self._sums.weight + self.controls.weight)
        torch.autograd.Variable._execution_engine.queue_callback(self._over)
        return True

    def _begin(self, weight: float) -> PendingReduction:
        """See the loop as it is now; what must be known before the first bucket travels during backward."""
        taken = self._loop.step_context()
        if taken.scaler.skipped_step:
            self.rest()
        if self._pending is not None:
            self._pending.taken = taken
            return self._pending
        at = self._context.aggregation(self.step, taken.momentum)
        compressor, transport = self._context.compressor, self._context.transport
        reduction = StepReduction(compressor, transport, self.names, at, self.reference, weight, tuner=self._tuner)
        self._pending = PendingReduction(reduction, self._buckets, self._context.comm_thread, taken)
        self._pending.begin(self._loop.warn)
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
                "around all but the last backward(), or use Dense(). An optimizer that calls backward() within its "
                "step, such as LBFGS, needs Dense()."
            )
        return self._sums.join(
            self._buckets.index(bucket), new, self.controls.weight, pending.taken.scaler.scale or 1.0
        )

    def _trailer(self, pending: PendingReduction, presence: Presence) -> StepTrailer:
        training = presence == Presence.TRAINING
        report = StepReport(
            weight=pending.reduction.weight,
            presence=presence,
            settings=rng.address(pending.taken.settings),
            first_nonfinite=NOBODY,
            stop=self.asked_to_stop,
            used=np.array([name in self._sums.used or grad is not None for name, grad in self._gradients()]) & training,
            moved=self._versions.moved() & training,
        )
        return StepTrailer(report=report, settings=pending.taken.settings, buffers=self._loop.buffers())

    def _gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        for bucket in self._buckets:
            for name, parameter in bucket.parameters.items():
                yield name, parameter.grad

    # -- when backward is over -----------------------------------------------------------------------------------------

    def _over(self) -> None:
        if self._sums.complete:
            self.finish()
            return
        self._sums.add(self.controls.weight, self.poll_scale(self._loop) or 1.0)
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
        refuse_to_save_apart(decision.presences)
        blame = pending.commit(decision)
        self.reference = pending.reduction.reference
        self.step += pending.committed
        self._versions.note()
        self._expect_all()
        if decision.active:
            self.phase = GradientPhase.AVERAGED if pending.committed else GradientPhase.FINISHED
            self._passes += 1
            self._loop.ended(not pending.committed, {"waiting_seconds": waited, **pending.reduction.costs()})
            self._loop.judged(blame)
        return decision

    # -- around the optimizer, and the epoch ---------------------------------------------------------------------------

    def before_step(self, *, closure: bool) -> None:
        if self.phase is GradientPhase.WAITING and not closure:
            self._over()  # no gradient hook fired here: the others wait for this rank
        self.in_optimizer = True

    def after_step(self) -> None:
        self.rest()

    def end_epoch(self) -> int:
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
            self.finish(Presence.SAVING)  # ranks that train on would not hear of it otherwise

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def remembered(self) -> NamedState:
        found = state_by_name(self._buckets)
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

    def take_over_from(self, before: Synchronizer) -> None:
        super().take_over_from(before)
        self._passes = before.passes

    @property
    def touched(self) -> bool:
        """Whether the averaged gradients were written to."""
        return any(bucket.touched for bucket in self._buckets)

    def rest(self) -> None:
        """The optimizer has made its step, or never will: what comes next is a new one."""
        self.phase, self.in_optimizer = GradientPhase.WAITING, False

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
