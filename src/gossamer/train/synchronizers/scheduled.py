"""Scheduled synchronizer: sync rounds are sent, overlap with training and land; each one is a transaction."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gossamer import events
from gossamer.algorithms.strategies import PeriodicSchedule, SyncRound
from gossamer.base.ops import AllReduceMean, Coalesced, Script
from gossamer.base.runner import ScriptCost, run_script
from gossamer.base.transport import Transport
from gossamer.comm.runtime.comm_streams import use_on_current_stream
from gossamer.errors import GossamerError, PeerLost
from gossamer.train.engine.autograd_hooks import LoopControls
from gossamer.train.engine.averaged_state import AveragedState
from gossamer.train.engine.bucket import Bucket, KeptInputs, copy_state, state_by_name
from gossamer.train.engine.bucket_reduction import StepTrailer, sum_costs, unsampled
from gossamer.train.engine.device_failures import undone
from gossamer.train.engine.loop import StepContext
from gossamer.train.engine.participation import Participants, ParticipationPoll, StepPace
from gossamer.train.engine.step_decision import NO_FLAGS, Presence, StepReport, settings_hash
from gossamer.train.synchronizers.base import NamedState, SyncContext, Synchronizer, without_unsent
from gossamer.train.synchronizers.in_flight import (
    Fragment,
    InFlightRound,
    OutgoingBucket,
    OutgoingRound,
    RoundResult,
    RoundTask,
    read_result,
)
from gossamer.train.synchronizers.local_step_counter import LocalStepCounter
from gossamer.train.synchronizers.speed_balance import LocalPace

LAG_STEPS = 16  # steps between two measurements of the lag


class ScheduledSynchronizer(Synchronizer):
    """Sends a task's offer for a fragment at each launch of a schedule, and applies the result at its landing.

    The schedule counts optimizer steps, including those that a GradScaler skips on this rank, so that all ranks count
    equally. Only the training thread writes tensors that training reads, at the boundary between two steps.
    """

    def __init__(
        self,
        schedule: PeriodicSchedule,
        fragments: Sequence[Sequence[Bucket]],
        task: RoundTask,
        context: SyncContext,
        start: int = 0,
        controls: LoopControls | None = None,
        *,
        by_speed: bool = False,
    ) -> None:
        super().__init__(controls)
        self.step = start
        self._schedule, self._task, self._start, self._number = schedule, task, start, 0
        self._fragments = [Fragment(buckets) for buckets in fragments]
        self._context, self._loop = context, context.loop
        self._in_flight: deque[InFlightRound] = deque()
        self._awaited = False  # new workers are to be admitted before the next step is counted
        self._copying = False  # new workers receive copies of the state in the background
        self._awaited_at = -1  # the landing of the round after which new workers were awaited
        self._admitted = 0  # the first round sent after the last admission
        self._kept = None if context.comm_thread.is_fixed else KeptInputs()
        self._merged: Mapping[str, Tensor] | None = None  # the mean of the ranks' own parameters after this step
        # With several rounds in flight, the poll of the next one does not wait until the previous one has landed.
        apart, frozen = schedule.delay > 0, None if task.keeps_alike else (self._loop.frozen or None)
        self._poll = ParticipationPoll(context.transport, context.comm_thread, apart=apart, frozen=frozen)
        device = next(iter(self.buckets)).flat.device
        self._pace = LocalPace(schedule.period, start, device) if by_speed else None
        rank, comm_thread, within = context.transport.rank, context.comm_thread, task.in_backward
        self._local = LocalStepCounter(
            self.controls, self._loop, rank, self.buckets, self._count, in_backward=within, comm_thread=comm_thread
        )

    @property
    def buckets(self) -> Sequence[Bucket]:
        return [bucket for fragment in self._fragments for bucket in fragment.buckets]

    @property
    def between_steps(self) -> bool:
        return self._local.between_steps

    @property
    def agreed(self) -> Mapping[str, Tensor] | None:
        return self._merged or self._task.agreed

    def merge(self) -> Mapping[str, Tensor] | None:
        if self._task.merges_own and self._merged is None:
            self._merge(Presence.MERGING)
        return self.agreed

    @torch.no_grad()
    def _merge(self, presence: Presence) -> None:
        """Average the current state of all ranks. Raises LoopError if some ranks continue training."""
        self._meet(presence)
        exact = ExactMean(self.buckets, AveragedState.of(self._loop.averaged()))
        with self._local.waiting():
            run = partial(exact.run, self._context.transport)
            performed = self._context.comm_thread.exchange(run).wait()
        self._local.add(False, sum_costs([performed]))
        self._merged = exact.by_name(performed.result)

    # -- local steps ---------------------------------------------------------------------------------------------------

    def _admit(self, *, admits: bool = True) -> None:
        """Admit new workers once the step is complete for the loop as well (it may count the step or step a scheduler
        after the optimizer). All ranks call it after the same round; new workers at once, as their first exchange."""
        if self._awaited:
            self._awaited, self._admitted = False, self._number
            self._exchange_nothing(admits=admits)

    def _admit_before_round(self, *, admits: bool = True) -> None:
        """Admit new workers with a copy of what all workers have in common, which the next round changes."""
        if self._copying and self._pace is None and self._awaited_at + 1 < self._next.launch:
            self._admitted = self._number
            self._exchange_nothing(admits=admits)

    def _exchange_nothing(self, *, admits: bool) -> None:
        go_on = partial(self._context.transport.all_gather_text, "go on")
        self._context.comm_thread.exchange(go_on, admits=admits).wait()
        self._copying = self._context.comm_thread.is_awaited

    @property
    def landed(self) -> int:
        return self._number - len(self._in_flight)

    def _count(self) -> None:
        self._admit()
        if self.step + 1 == self._next.launch:
            self._admit_before_round()
        if self._task.in_backward:
            self._task.check_pass(counted=self._local.counted)
        self.step, self._merged = self.step + 1 if self._pace is None else self._pace.advance(self.step), None
        weight = self._local.take_weight()
        for fragment in self._fragments:
            fragment.weight += weight
            fragment.steps += 1
        if self._task.guards_gradients and self._loop.scale() is None:
            self._local.drop_nonfinite()
        if self._task.in_backward and not self._boundary():
            self._task.nothing_landed()

    def before_step(self, *, closure: bool) -> None:
        if self._task.in_backward:
            self._task.check_step(closure=closure)
            if not self._local.counted:
                self._loop.check.note_missing_pass()
        self._local.before_step(closure=closure)

    def after_step(self) -> None:
        self._local.after_step()
        if not self._task.in_backward:
            self._boundary()
        self._local.report()

    # -- sending -------------------------------------------------------------------------------------------------------

    def _boundary(self) -> bool:
        """Send and land all rounds that are due, in order. Returns whether a round has landed."""
        landed = 0
        while (due := self._next).launch <= self.step:
            landed += self._land_until(due.launch - 1)
            if self.stopping:
                return landed > 0  # the other ranks send no further round
            self._send(due, Presence.TRAINING, self._looked())
        return landed + self._land_until(self.step) > 0

    @property
    def _next(self) -> SyncRound:
        return self._sync_round(self._number)

    def _sync_round(self, number: int) -> SyncRound:
        fragment, launch, landing = self._schedule.sync_round(number)
        return SyncRound(fragment, launch + self._start, landing + self._start)

    def _looked(self) -> ScriptCost | None:
        """Poll before a round in which frozen parameters are compared: its result lists those that it averages."""
        if not self._poll.looks(self._number):
            return None
        with self._local.waiting():
            return self._poll_ranks(self._fragments[self._next.fragment], Presence.TRAINING)

    def _poll_ranks(self, fragment: Fragment | None, presence: Presence) -> ScriptCost:
        """Poll before a round of `fragment`, or without a round."""
        weight = 0.0 if fragment is None else fragment.weight
        polled = self._poll.poll(weight, self.step, presence, self._number, self._pace_of(fragment))
        if self._pace is not None:
            self._pace.clock.begin()
        return polled

    def _pace_of(self, fragment: Fragment | None) -> StepPace | None:
        if self._pace is None:
            return None
        return StepPace(self._pace.clock.part_seconds, 0 if fragment is None else fragment.steps)

    def _send(self, sync_round: SyncRound, presence: Presence, participants: ScriptCost | None = None) -> None:
        """Send the next round. participants: the result of its poll, if the poll is complete."""
        fragment = self._fragments[sync_round.fragment]
        pace, steps = (None, 0) if self._pace is None else (self._pace_of(fragment), fragment.steps)
        weight, fragment.weight, fragment.steps = fragment.weight, 0.0, 0
        now = self._loop.now()
        keeps, state = self._task.keeps_offers, self._task.averaged_state(self._number)
        outgoing = OutgoingRound(
            buckets=[OutgoingBucket(bucket, self._task.offer(bucket, presence), keeps) for bucket in fragment.buckets],
            averaged_state=state.numbers(),
            trailer=self._trailer(fragment, weight, presence, now),
            weight=weight,
            at=self._context.aggregation(self._number // len(self._fragments)),
            first_batch=now.first_batch,
            measures_lag=not self._task.keeps_alike and self._looks_at_lag,
            agree=self._loop.agree_in_round,
        )
        poll = self._poll.ask(weight, self.step, presence, pace) if participants is None else lambda: participants
        work = self._context.comm_thread.submit(partial(self._reduce, outgoing, poll))
        sent = state.counted_on() if sync_round.landing > sync_round.launch else {}
        self._in_flight.append(
            InFlightRound(self._number, sync_round, outgoing.buckets, work, state.names, sent, steps)
        )
        self._number += 1

    @property
    def _looks_at_lag(self) -> bool:
        """Measure the lag at most once in LAG_STEPS steps, since it reads the parameters twice."""
        rounds = LAG_STEPS * len(self._fragments) // self._schedule.period
        return (self._number + 1) % max(1, rounds) == 0

    def _trailer(self, fragment: Fragment, weight: float, presence: Presence, now: StepContext) -> StepTrailer:
        check = self._loop.check
        report = StepReport(
            weight=weight,
            presence=presence,
            settings=settings_hash(now.settings),
            steps=self.step if self._task.keeps_alike else 0,
            used=self._task.used(fragment.buckets, presence),
            moved=NO_FLAGS,
            stop=self.asked_to_stop,
            lap=now.lap,
        )
        alike = self._task.keeps_alike and presence == Presence.TRAINING
        sample = check.sampled(self.step) if alike else unsampled
        return StepTrailer(report=report, settings=now.settings, check=check, buffers=(), sample=sample)

    def _reduce(self, outgoing: OutgoingRound, poll: Callable[[], ScriptCost]) -> RoundResult:
        """Poll, reduce and commit a round. On the communication thread."""
        participants = poll()
        if self._kept is not None:
            self._kept.clear()
        exchange = partial(self._exchange, outgoing, participants, self.reference)
        return self._context.comm_thread.as_transaction(exchange)()

    def _exchange(self, outgoing: OutgoingRound, polled: ScriptCost, reference: float | None) -> RoundResult:
        """Reduce and commit among the remaining participants."""
        context = self._context
        members = context.comm_thread.members(context.transport.world)
        participants: Participants = polled.result.among(members)
        reduction = outgoing.reduction(context, replace(polled, result=participants), reference, self._kept)
        if reference is None:
            reduction.open(outgoing.first_batch, self._loop.warn)
            self.reference = reduction.reference
        result = outgoing.run(reduction, active=participants.active)
        mean_steps = participants.mean_steps if participants.paces else 0.0
        return replace(result, awaited=participants.awaited, paces=participants.paces, mean_steps=mean_steps)

    # -- landing -------------------------------------------------------------------------------------------------------

    def _land_until(self, passes: int) -> int:
        """Apply or revert the rounds due at step `passes`. Returns their number."""
        landed = 0
        while self._in_flight and self._in_flight[0].sync_round.landing <= passes:
            self._land(self._in_flight[0])
            landed += 1
        return landed

    @torch.no_grad()
    def _land(self, landed: InFlightRound) -> None:
        with self._local.waiting():
            result = landed.work.wait()
            self._in_flight.popleft()  # after the wait: new workers receive the list of pending rounds
            use_on_current_stream((*result.means, *result.owns, result.averaged_state))
        self.stopping, self.all_trained = self.stopping or result.stop, result.all_trained
        if result.awaited and landed.number >= self._admitted:
            self._awaited, self._awaited_at = True, landed.sync_round.landing
        if result.parted:
            self._context.compare_parameters(result.parted, self.step)
        elif result.committed and self._task.keeps_alike:
            self._loop.check.note_alike(landed.sync_round.launch)
        self._local.add(not result.committed, result.costs)
        if result.lag is not None:
            events.emit(events.Logged(step=self.step, values={"lag": result.lag}))
        if result.committed:
            self._task.apply(landed, result)
        else:
            self._task.revert(landed)
        self._loop.judged("exchange", result.blame)
        if self._pace is not None:
            self._adapt(self._pace, [pace.step_seconds for pace in result.paces])
        if result.shortage:
            raise undone(result.shortage)

    def _adapt(self, pace: LocalPace, seconds: Sequence[float]) -> None:
        """Let the local steps and the data of this worker follow the speeds of all workers."""
        transport, comm_thread = self._context.transport, self._context.comm_thread
        members = comm_thread.members(transport.world)
        if pace.adapt(seconds, members, rank=transport.rank, position=self.step):
            self._loop.divide_data(pace.shares)
        pace.clock.begin()

    # -- the epoch, and all ranks together -----------------------------------------------------------------------------

    def end_epoch(self) -> int:
        return self._task.end_epoch(self._shadow())

    def _shadow(self) -> int:
        """Join the rounds of the other ranks until all are out of data; all ranks are then at the same pass."""
        self._boundary()
        missed = 0
        while not self._stops_before((due := self._next).launch):
            self._admit(admits=False)  # new workers have a whole epoch of data, this rank has none
            self._admit_before_round(admits=False)
            polled = self._poll_ranks(self._fragments[due.fragment], Presence.OUT_OF_DATA)
            participants: Participants = polled.result
            if not participants.active and participants.together:
                return missed
            self.step = max(self.step, due.launch)
            self._land_until(due.launch - 1)
            self._send(due, Presence.OUT_OF_DATA, polled)
            self._land_until(self.step)
            self._local.report()
            missed += participants.active
            if not participants.active or self.stopping:
                return missed
        return missed

    def _stops_before(self, launch: int) -> bool:
        """Whether a round that lands before `launch` stops the run, so that the others send no further round."""
        for each in list(self._in_flight):
            if each.sync_round.landing < launch and each.work.wait().stop:
                self.step = max(self.step, each.sync_round.landing)
                self._land_until(self.step)
        return self.stopping

    def end_run(self) -> None:
        """Compare the number of steps of all ranks. The last rounds land after the last step, so no later round would
        reveal a rank that made fewer. Where steps follow the speeds, join the rounds of the others until all end."""
        if self._task.keeps_alike:
            with suppress(PeerLost):  # a rank has left without notice
                participants: Participants = self._poll_ranks(None, Presence.ENDING).result
                self._loop.check.agree_on_steps(dict(enumerate(participants.passes)))
        elif self._task.merges_own:
            with suppress(GossamerError):
                self._merge(Presence.ENDING)
        elif self._pace is not None:
            self._shadow()  # a slow worker's last step may reach a round that the others' last steps do not

    def meet_to_save(self, call: Presence = Presence.SAVING) -> None:
        self._meet(call)

    def _meet(self, presence: Presence) -> None:
        self._boundary()
        self._poll_ranks(None, presence)

    def flush(self) -> None:
        if self._task.in_backward:
            self._await()
        else:
            self._land_until(sys.maxsize)

    def _await(self) -> None:
        for each in self._in_flight:
            each.work.wait()  # it writes compressor state

    def restart(self) -> None:
        self._merged = None
        self._task.restart()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def remembered(self) -> NamedState:
        self._await()
        found = state_by_name(self.buckets)
        for name, views in self._task.state.items():
            found.setdefault(name, {}).update(views)
        return found

    def progress(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "turn": self._number,
            "reference": self.reference,
            "weights": [fragment.weight for fragment in self._fragments],
            "flights": [each.written() for each in self._in_flight],
            "frozen": self._loop.frozen.names,
            "agreed_state": dict(self._task.agreed_state),
            **({} if self._pace is None else {"pace": self._pace.progress(), "local_steps": self._local_steps}),
        }

    @property
    def _local_steps(self) -> list[int]:
        return [fragment.steps for fragment in self._fragments]

    def resume(self, progress: Mapping[str, Any], remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._await()
        self.step, self._number, self.reference = progress["step"], progress["turn"], progress["reference"]
        made = progress.get("local_steps", [0] * len(self._fragments))
        for fragment, weight, steps in zip(self._fragments, progress["weights"], made, strict=True):
            fragment.weight, fragment.steps = weight, steps
        if self._pace is not None:
            self._pace.resume(progress.get("pace"))
        self._local.rest()
        self._merged = None
        self._loop.frozen.resume(progress.get("frozen", ()))
        self._task.agreed_state = {name: each.clone() for name, each in progress.get("agreed_state", {}).items()}
        self._in_flight = deque(map(self._read, progress["flights"]))
        copy_state(remembered, self.remembered())

    def begin_at(self, step: int) -> None:
        self.step = max(step, self._start)
        while self._next.launch <= self.step:
            self._number += 1

    def handed_over(self) -> dict[str, Any]:
        """Include rounds in flight, which land on a new worker at the same step as here."""
        none = [0] * len(self._fragments)
        blank: dict[str, Any] = {"weights": [0.0] * len(none)}  # of samples since the last round: local
        if self._pace is not None:
            blank |= {"pace": None, "local_steps": none}  # a new worker has its own speed
        return {"progress": {**self.progress(), **blank}, "state": without_unsent(self.remembered())}

    def take_up(self, handed: Mapping[str, Any]) -> None:
        super().take_up(handed)
        self._task.adopt_memory()
        self._awaited = True  # as on the workers that admit it

    def _read(self, written: Mapping[str, Any]) -> InFlightRound:
        number, keeps = written["number"], self._task.keeps_offers
        sync_round = self._sync_round(number)
        buckets = self._fragments[sync_round.fragment].buckets
        offers = [offer.clone() for offer in written["offers"]] or [bucket.flat for bucket in buckets]
        outgoing = [OutgoingBucket(*each, keeps) for each in zip(buckets, offers, strict=True)]
        about = written.get("along"), written.get("sent", {}), written.get("steps", 0)
        result = read_result(written)
        return InFlightRound(number, sync_round, outgoing, self._context.comm_thread.submit(lambda: result), *about)

    def take_over_from(self, before: Synchronizer) -> None:
        super().take_over_from(before)
        assert isinstance(before, ScheduledSynchronizer)
        self._number, self._task.agreed_state = before._number, before._task.agreed_state
        for own, previous in zip(self._fragments, before._fragments, strict=True):
            own.weight, own.steps = previous.weight, previous.steps

    def close(self) -> None:
        self._local.close()
        self._poll.close()


# -- the uncompressed mean of all ranks' parameters and other state, for `merge` ---------------------------------------


@dataclass(frozen=True)
class ExactMean:
    """Uncompressed mean of parameters, by bucket, and of the other averaged state."""

    buckets: Sequence[Bucket]
    averaged_state: AveragedState

    def run(self, transport: Transport) -> ScriptCost:
        """Average over all ranks. On the communication thread, while the training thread waits."""
        flats = [bucket.gather_parameters(torch.empty_like(bucket.flat)) for bucket in self.buckets]
        numbers = self.averaged_state.numbers()
        return run_script(exact_means(flats if numbers is None else [*flats, numbers]), transport)

    def by_name(self, means: Sequence[Tensor]) -> dict[str, Tensor]:
        """The result of `run` by the names of the model's tensors."""
        use_on_current_stream(means)
        found = {
            slot.name: slot.view(mean)
            for bucket, mean in zip(self.buckets, means, strict=False)
            for slot in bucket.layout
        }
        along = means[len(self.buckets) :]
        return found if not along else {**found, **self.averaged_state.named(along[0])}


def exact_means(flats: Sequence[Tensor]) -> Script:
    """Overwrite each tensor with its uncompressed mean over all ranks."""
    return (yield Coalesced(tuple(AllReduceMean(flat, out=flat) for flat in flats)))
