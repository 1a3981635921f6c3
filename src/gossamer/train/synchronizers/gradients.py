"""Gradient synchronizer: averages gradients during backward, bucket by bucket.

A step is a transaction. Hooks pass full buckets to the communication thread while backward continues; compressors stage
their new state; the last operation of the step exchanges a report of every rank; then all ranks commit, or none does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.algorithms.strategies import GradientStage
from gossamer.base import flight_recorder
from gossamer.base.aggregation import AggregationContext
from gossamer.base.spans import active
from gossamer.base.spans.record_format import SpanKind
from gossamer.comm.runtime.pipeline import PipelineTuner
from gossamer.errors import LoopError
from gossamer.events import notice, sampled
from gossamer.train.engine.autograd_hooks import LoopControls
from gossamer.train.engine.bucket import (
    NO_INPUT,
    SUM,
    Bucket,
    BucketInput,
    GradientAccumulator,
    KeptInputs,
    copy_state,
    kept_gradients,
    refuse_late_part,
)
from gossamer.train.engine.bucket_reduction import (
    PendingReduction,
    StepReduction,
    StepTrailer,
    sum_costs,
    unsampled,
)
from gossamer.train.engine.device_failures import undone
from gossamer.train.engine.model_buffers import BufferVersions
from gossamer.train.engine.participation import refuse_apart
from gossamer.train.engine.sparse_gradients import SparseGradients
from gossamer.train.engine.step_decision import NO_FLAGS, Presence, StepDecision, StepReport, settings_hash
from gossamer.train.synchronizers.base import NamedState, SyncContext, Synchronizer, without_unsent
from gossamer.train.synchronizers.speed_balance import StepShares


class AdmissionGate:
    """Admits new workers between two steps, so that all passes of the next step are divided among all members.

    A worker admitted during a step would add its own passes to the exchange that ends it.

    Args:
        gates: whether a step has several passes.
    """

    def __init__(self, context: SyncContext, *, gates: bool) -> None:
        self._context, self.gates = context, gates
        self.awaited = False  # equal on all ranks after the same exchange

    def note(self) -> None:
        """Called after an exchange: store whether workers waited for admission when it began."""
        self.awaited = self.gates and self._context.comm_thread.is_awaited

    def joined(self) -> None:
        """Called on a new worker, which joins the exchange of the members that admit it."""
        self.awaited = self.gates

    def let_in(self, *, admits: bool = True) -> None:
        """Admit waiting workers. All ranks call it before their next exchange. admits: whether this rank trains."""
        if self.awaited:
            self.awaited = False
            go_on = partial(self._context.transport.all_gather_text, "go on")
            self._context.comm_thread.exchange(go_on, admits=admits).wait()


MANY_DROPPED = 10
AT_ONCE = GradientStage(0)


class GradientPhase(Enum):
    """State of the gradients since the last optimizer step."""

    WAITING = auto()  # no gradients
    FINISHED = auto()  # a pass was accumulated, or its reduction skipped
    AVERAGED = auto()  # averaged; no optimizer step has used them


class GradientSynchronizer(Synchronizer):
    """Averages the gradients in `buckets` and sparse gradients over a group. Dense gradients are averaged once per
    step, as `stage` defines it; sparse gradients in every backward pass."""

    judges_latest_pass = True

    def __init__(
        self,
        buckets: Sequence[Bucket],
        sparse: SparseGradients,
        context: SyncContext,
        stage: GradientStage = AT_ONCE,
        controls: LoopControls | None = None,
    ) -> None:
        super().__init__(controls)
        self._buckets, self._sparse, self._passes = buckets, sparse, 0
        self._parts: Sequence[Bucket | SparseGradients] = (*buckets, sparse)
        self.phase, self.in_optimizer = GradientPhase.WAITING, False
        self._stage, self._admission = stage, AdmissionGate(context, gates=stage.accumulates or stage.in_one_pass)
        self._sums = GradientAccumulator(buckets, self._due if stage.accumulates else 1)
        self._parameters = {name: each for part in self._parts for name, each in part.parameters.items()}
        self.names = list(self._parameters)
        device = next(iter(self._parameters.values())).device
        self._shares = StepShares(stage, device) if stage.balance else None
        self._context, self._loop = context, context.loop
        self._graph_reported = False
        self._seen_pass = False  # whether a complete pass showed which gradients arrive in parts
        self._pending: PendingReduction | None = None
        # The tuner follows the number of exchanges, which differs on workers that joined later
        self._tuner = PipelineTuner() if context.comm_thread.is_fixed else None
        self._versions = BufferVersions(context.loop.buffers) if context.loop.buffers() else None
        self._unused, self._dropped = 0, 0  # accumulated averages that no optimizer used; discarded ones in a row
        self._carries = False  # whether an unused average remained at the end of the last epoch
        self._seen: list[int] = []  # versions of some parameters at the time of that average
        self._trained: Sequence[int] = self._members  # ranks that trained in the previous exchange
        self._kept = None if context.comm_thread.is_fixed else KeptInputs(buckets)
        self._bucket_of = {name: bucket for bucket in buckets for name in bucket.parameters}
        self._watch = self._loop.gradients(self._parameters, self._over, self._pass_began, self._ready, self.controls)

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    @property
    def passes(self) -> int:
        return self._passes

    @property
    def steps(self) -> int:
        return self.step - self._unused if self._left_unused() else self.step

    @property
    def accumulating(self) -> bool:
        return self._sums.made > 0

    @property
    def between_steps(self) -> bool:
        return not self.accumulating and (self.phase is GradientPhase.WAITING or self._carries)

    @property
    def _members(self) -> Sequence[int]:
        return self._context.comm_thread.members(self._context.transport.world)

    @property
    def _share(self) -> int:
        """Parts of this step that this rank computes."""
        transport = self._context.transport
        if self._shares is not None:
            return self._shares.of(self.step, self._members)[transport.rank]
        return self._stage.shares(transport.world, self.step)[transport.rank]

    def _due(self) -> int:
        return 1 if self._stage.in_one_pass else self._share

    @property
    def batch_size(self) -> int:
        if self._stage.batches is None:
            return super().batch_size
        return self._share if self._stage.in_one_pass else self._stage.batch

    def _ready(self, name: str, parameter: Tensor) -> None:
        """Called for each gradient, or part of one, that backward has computed. It runs once per parameter and must be
        cheap. Sparse gradients are sent after the pass, since few rows are not worth a message of their own."""
        bucket = self._bucket_of.get(name)
        if bucket is None:
            return
        bucket.arrive(name)
        if self._pending is None:
            return
        if name in bucket.early:
            bucket.take(name, parameter)
        if bucket.in_parts:
            refuse_late_part(bucket, name, self._buckets[: self._pending.sent])
        elif self._seen_pass and not bucket.missing:
            while (sent := self._pending.sent) < len(self._buckets) and self._buckets[sent].complete:
                self._send(self._pending, Presence.TRAINING)

    def _pass_began(self) -> None:
        if torch.is_grad_enabled():
            self._report_graph()
        for begin in self._loop.extensions.pass_began:
            begin()
        if self._pending is not None and self._pending.sent:
            raise LoopError(
                "the previous backward pass did not finish, and part of its gradients was sent already, so the ranks "
                "are out of step. Continue from the last checkpoint, as gossamer run --max-restarts 1 does."
            )
        for bucket in self._buckets:
            bucket.expect_all()
        self._carries = False
        if self._unused:
            self._drop_thrown_away()
        if self._admission.awaited:
            self._let_in()
        if self._stage.in_one_pass:
            self.controls.weight = float(self._share)
        if self._sums.complete:
            self._begin(self._sums.weight + self.controls.weight)

    def _report_graph(self) -> None:
        """Print a notice, once, about a backward pass with create_graph=True."""
        if not self._graph_reported and self._context.transport.rank == 0:
            notice(
                "backward(create_graph=True) was called. The averaged gradients in parameter.grad have no graph, so "
                "they cannot be differentiated again. For second derivatives, as of AdaHessian, write gradients = "
                "torch.autograd.grad(loss, parameters, create_graph=True), which stay on this rank, and differentiate "
                "these; then call loss.backward() for the averaged gradients."
            )
        self._graph_reported = True

    def _begin(self, weight: float, presence: Presence = Presence.TRAINING) -> PendingReduction:
        """Start the reduction with the current state of the loop, before the first bucket is sent during backward."""
        taken = self._loop.now()
        if self._pending is not None:
            self._pending.taken = taken
            return self._pending
        context = self._context
        compressor, transport = context.compressor, context.transport
        at = AggregationContext(
            step=self.step, seed=context.seed, rank=transport.rank, world=transport.world, **taken.moments._asdict()
        )
        if self._kept is not None:
            self._kept.clear()
        reduction = StepReduction(compressor, transport, self.names, at, self.reference, weight, tuner=self._tuner)
        reduction.kept, reduction.since = self._kept, context.since
        tensors = self._loop.tensors
        reduction.sampler = tensors if tensors is not None and tensors.clock() >= tensors.due and sampled() else None
        flight_recorder.current.buckets = len(self._buckets)
        admits = presence == Presence.TRAINING and not self._admission.gates
        self._pending = PendingReduction(
            reduction, self._buckets, self._sparse, context.comm_thread, taken, self._loop.agree, admits
        )
        self._pending.begin(self._loop.warn, self._trained, self._loop.check)
        return self._pending

    def _send(self, pending: PendingReduction, presence: Presence) -> None:
        """Send the next bucket. The last one carries this rank's report, unless sparse gradients follow."""
        bucket = self._buckets[pending.sent]
        last = bucket is self._buckets[-1] and not self._sparse.parameters
        fresh = self._input(pending, bucket) if presence == Presence.TRAINING else NO_INPUT
        pending.send(fresh, self._trailer(pending, presence) if last else None)

    def _input(self, pending: PendingReduction, bucket: Bucket) -> BucketInput:
        new, held = bucket.new_gradients()
        if bucket.state and self.phase is GradientPhase.AVERAGED and (self.in_optimizer or held):
            raise LoopError(
                "a second backward() before optimizer.step() would send the averaged gradients once more, and "
                f"{self._context.compressor!r} would store a wrong residual. Accumulate with `with session.no_sync():` "
                "around all but the last backward(), or use Dense(). Clear gradients that no optimizer uses, such as "
                "those of a GAN generator's pass for the discriminator, by zero_grad() before the next backward(). An "
                "optimizer that calls backward() within its step, such as LBFGS, needs Dense()."
            )
        return self._sums.join(self._buckets.index(bucket), new, self.controls.weight, pending.taken.scale or 1.0)

    def _trailer(self, pending: PendingReduction, presence: Presence) -> StepTrailer:
        training, check, settings = presence == Presence.TRAINING, self._loop.check, pending.taken.settings
        buffers, moved = ((), NO_FLAGS) if self._versions is None else self._versions.look()
        accumulated = self._sums.used
        used = [p.grad is not None or name in accumulated for name, p in self._parameters.items()]
        report = StepReport(
            weight=pending.reduction.weight,
            presence=presence,
            settings=settings_hash(settings),
            steps=self.step,
            stop=self.asked_to_stop,
            lap=pending.taken.lap,
            look=self.asked_to_look,
            used=np.array(used) & training,
            moved=moved & training,
            part_seconds=None if self._shares is None else self._shares.clock.part_seconds,
        )
        sample = partial(check.sample, self.step) if training else unsampled
        return StepTrailer(report=report, settings=settings, check=check, buffers=buffers, sample=sample)

    # -- after backward ------------------------------------------------------------------------------------------------

    def _let_in(self) -> None:
        self._admission.let_in()
        if self._shares is not None:
            self._shares.clock.drop()

    def _over(self, *, seen: bool = True) -> None:
        """Called after a backward pass, or with seen=False if no gradient hook was called in it."""
        self._seen_pass = self._seen_pass or seen
        if self._admission.awaited:
            self._let_in()
        if self._sums.complete:
            self.finish()
            return
        self._sums.add(self.controls.weight, self._loop.scale() or 1.0)
        self._passes += 1
        if self.phase is GradientPhase.WAITING:
            self.phase = GradientPhase.FINISHED

    def finish(self, presence: Presence = Presence.TRAINING) -> StepDecision:
        """Send the remaining buckets, wait for the exchange, and commit or skip the step as all ranks decide. A rank
        that is not training has no data and sends zeros."""
        training = presence == Presence.TRAINING
        if self._admission.awaited:
            self._admission.let_in(admits=False)  # this rank has made no pass, and has no data
        pending = self._pending or self._begin(self._sums.weight + self.controls.weight if training else 0.0, presence)
        for bucket in self._buckets[pending.sent :]:
            if not training:
                bucket.flat.zero_()
            self._send(pending, presence)
        if self._sparse.parameters:
            rows = self._sparse.rows() if training else self._sparse.no_rows()
            pending.send_rows(rows, self._trailer(pending, presence))
        if self._shares is not None:
            self._shares.clock.end(self._share if training else 0)
        asked = time.perf_counter()
        decision = pending.wait()
        if training and self._sums.made:
            self._sums.clear()
        answered = time.perf_counter()
        if active.recorder is not None:
            active.recorder.add(SpanKind.WAITING, asked, answered)
        return self._settle(pending, decision, answered - asked)

    def _settle(self, pending: PendingReduction, decision: StepDecision, waited: float) -> StepDecision:
        self._pending = None
        if self._admission.gates:
            self._admission.note()
        self.stopping, self.all_trained, self.look_asked = decision.stop, decision.all_trained, decision.look
        if not decision.all_trained:
            refuse_apart(decision.presences)
        if decision.parted:
            self._context.compare_parameters(decision.parted, self.step)
        elif decision.presences[self._context.transport.rank] == Presence.TRAINING and decision.in_step:
            self._loop.check.note_alike(self.step)
        blame, self.reference = pending.commit(decision), pending.reduction.reference
        if decision.presences[self._context.transport.rank] == Presence.OUT_OF_DATA:
            self._passes -= max(0, self.step - pending.reduction.at.step)  # averages that the others have discarded
            self._unused = 0
        self.step = max(pending.reduction.at.step, *decision.steps.values(), 0) + pending.committed
        if self._versions is not None:
            self._versions.note()
        if decision.active:
            members = self._members
            self._trained = list(map(members.__getitem__, decision.active))
            self._unused = self._unused + 1 if pending.committed and not self.in_optimizer else 0
            self._seen = self._parameter_versions()
            self.phase = GradientPhase.AVERAGED if pending.committed else GradientPhase.FINISHED
            self._passes += 1
            self._loop.ended(not pending.committed, {"waiting_seconds": waited, **sum_costs(pending.reduction.spent)})
            self._loop.judged("exchange", blame)
        if self._shares is not None:
            rank = self._context.transport.rank
            if self._shares.review(decision.part_seconds, self.step, self._members, rank=rank):
                self._loop.divide_data(self._shares.of(self.step, self._members))
            self._shares.clock.begin()
        if pending.reduction.shortage:  # on every rank
            raise undone(pending.reduction.shortage)
        return decision

    # -- averages that no optimizer uses -------------------------------------------------------------------------------

    def use(self) -> None:
        self._unused, self._dropped = 0, 0

    def _drop_thrown_away(self) -> None:
        """Discard an unused average if its gradients were cleared without an optimizer step (e.g. a GAN generator
        pass, a saliency map), and roll back the compressor state."""
        if not self._left_unused():
            return
        parts = self._parts
        if not any(part.still_shown for part in parts) or all(part.zeroed for part in parts):
            self._drop_unused()  # otherwise this pass accumulates onto it

    def _left_unused(self) -> bool:
        """Whether no optimizer used the last average. Parameters modified by the script count as use."""
        if self._unused and self._seen != self._parameter_versions():
            self.use()
        return self._unused > 0

    def _drop_unused(self) -> None:
        """Roll back the compressor state of an unused average; otherwise the next average would include it."""
        if not self._left_unused():
            return
        for bucket in self._buckets:
            bucket.roll_back()
        self.step, self._passes = self.step - self._unused, self._passes - self._unused
        self._unused, self._dropped = 0, self._dropped + 1
        self.rest()
        if self._dropped == MANY_DROPPED and self._context.transport.rank == 0:
            notice(
                f"{MANY_DROPPED} backward passes in a row were averaged without an optimizer step, and their gradients "
                "were discarded. Call optimizer.step() after backward()."
            )

    def _parameter_versions(self) -> list[int]:
        """Version counters (number of writes) of the first parameter of every part."""
        return [next(iter(part.parameters.values()))._version for part in self._parts if part.parameters]

    # -- around the optimizer, and the epoch ---------------------------------------------------------------------------

    def before_step(self, *, closure: bool) -> None:
        if self.phase is GradientPhase.WAITING and not closure:
            if not any(part.has_new for part in self._parts):
                self._loop.check.note_missing_pass()
            self._over(seen=False)  # the other ranks wait for this one
        self.in_optimizer = True
        self.use()

    def end_epoch(self) -> int:
        kept = self._kept_average()
        if kept is None:
            self._drop_unused()
        unused, missed = self._unused, 0
        while self.passes != self.last_pass and (decision := self.finish(Presence.OUT_OF_DATA)).active:
            missed += 1
            self._loop.missed()
            if decision.stop:
                return missed
        if kept is not None and not missed:
            for bucket, flat, names in kept:
                bucket.flat.copy_(flat)
                bucket.point(names)
            self._unused, self._carries = unused, True
            return 0
        for part in self._parts:
            part.clear()
        self.rest()
        return missed

    def _kept_average(self) -> Sequence[tuple[Bucket, Tensor, set[str]]] | None:
        """Buckets, means and names of gradients that remain after the epoch, for an optimizer step below it or for the
        next epoch's passes. None if all gradients are discarded: if an optimizer used them, if they were cleared, or
        if a rank ran out of data earlier and has another sum."""
        stays = self._context.comm_thread.is_fixed and self.last_pass is None
        sums = not self._sparse.parameters and not any(bucket.state for bucket in self._buckets)
        waits = self.phase is GradientPhase.AVERAGED and self._left_unused() and not self.touched
        if not (stays and sums and waits and self.all_trained) or all(bucket.zeroed for bucket in self._buckets):
            return None
        found = [(bucket, bucket.flat.clone(), bucket.shown) for bucket in self._buckets]
        return found if any(names for _, _, names in found) else None

    def meet_to_save(self, call: Presence = Presence.SAVING) -> None:
        with kept_gradients(self._parameters.values()):
            if self._left_unused():
                for bucket in self._buckets:
                    bucket.keep_before()
            self.finish(call)  # informs ranks that continue training

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def remembered(self) -> NamedState:
        found: NamedState = {}
        for bucket in self._buckets:
            found |= bucket.state_by_name(rolled_back=self._unused > 0)
        for name, total in self._sums.state():
            found.setdefault(name, {})[SUM] = total
        return found

    def progress(self) -> dict[str, Any]:
        return {
            "step": self.step - self._unused,
            "passes": self._passes - self._unused,
            "reference": self.reference,
            "trained": [rank for rank, member in enumerate(self._members) if member in self._trained],
            "accumulated": self._sums.progress(),
            **({} if self._shares is None else {"shares": self._shares.progress()}),
        }

    def resume(self, progress: Mapping[str, Any], remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.step, self._passes, self.reference = progress["step"], progress["passes"], progress["reference"]
        self._sums.resume(progress["accumulated"])
        if self._shares is not None and "shares" in progress:
            self._shares.resume(progress["shares"])
        ranks = progress.get("trained", range(len(self._members)))
        self._unused, self._trained = 0, [self._members[rank] for rank in ranks]
        self.rest()
        copy_state(remembered, self.remembered())

    def handed_over(self) -> dict[str, Any]:
        state = {
            name: {key: tensor for key, tensor in kept.items() if key != SUM}
            for name, kept in without_unsent(self.remembered()).items()
        }
        sums = {"made": 0, "weight": 0.0, "used": []}  # local to each worker; a new worker makes all its passes
        progress = {**self.progress(), "passes": self._passes - self._sums.made, "accumulated": sums}
        del progress["trained"]  # ranks of this group; members follow
        return {"progress": progress, "state": state, "trained": list(self._trained)}

    def take_up(self, handed: Mapping[str, Any]) -> None:
        super().take_up(handed)
        self._trained = handed["trained"]
        self._admission.joined()

    def begin_at(self, step: int) -> None:
        self.step = self._passes = step

    def take_over_from(self, before: Synchronizer) -> None:
        super().take_over_from(before)
        self._passes = before.passes

    @property
    def touched(self) -> bool:
        return any(bucket.touched for bucket in self._buckets)

    def rest(self) -> None:
        """Prepare for a new step."""
        self.phase, self.in_optimizer = GradientPhase.WAITING, False

    after_step = rest

    def close(self) -> None:
        self._watch.close()
