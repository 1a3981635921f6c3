"""Exchanges that leave, travel while training goes on, and land: each a transaction of its own."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.core import rng
from gossamer.kernels import all_finite
from gossamer.reducer.averaged_state import AveragedState
from gossamer.reducer.backward_hooks import BackwardMonitor
from gossamer.reducer.bucket import Bucket, copy_state, state_by_name
from gossamer.reducer.participation import Participants, ParticipationPoll
from gossamer.reducer.reduction import NO_INPUT, StepReduction, StepTrailer, with_own, without_own
from gossamer.reducer.step_report import NOBODY, Flags, Presence, StepReport
from gossamer.runtime.comm_thread import use_on_current_stream
from gossamer.runtime.runner import ScriptCost
from gossamer.strategies import PeriodicSchedule, SyncRound
from gossamer.synchronizers.base import NamedState, StepCosts, SyncContext, Synchronizer
from gossamer.synchronizers.in_flight import Fragment, InFlightRound, OutgoingBucket, RoundResult, read_result

NO_FLAGS = np.zeros(0, dtype=bool)


class ScheduledSynchronizer(Synchronizer):
    """Talks as a schedule says: offers something of a fragment at each launch, uses the answer at its landing.

    Everything is counted in backward passes, which all ranks make alike, not in steps that an optimizer took. Only the
    training thread writes what training reads, at the boundary between two steps.
    """

    keeps_offers = False

    def __init__(
        self,
        schedule: PeriodicSchedule,
        fragments: Sequence[Sequence[Bucket]],
        context: SyncContext,
        start: int = 0,
    ) -> None:
        super().__init__()
        self.step = start
        self._schedule, self._start, self._number = schedule, start, 0
        self._fragments = [Fragment(buckets) for buckets in fragments]
        self._context, self._loop, self._transport = context, context.loop, context.transport
        self._under_way: deque[InFlightRound] = deque()
        self._counted = self._within_closure = False
        self._waited, self._costs, self._skipped = 0.0, dict[str, float](), False
        # Where several turns are under way, who comes to the next is asked while the one before still travels.
        self._poll = ParticipationPoll(context.transport, context.comm_thread, apart=schedule.delay > 0)
        self._passes_seen = BackwardMonitor(self._parameters(), self._pass_over)

    @property
    def buckets(self) -> Sequence[Bucket]:
        return [bucket for fragment in self._fragments for bucket in fragment.buckets]

    @property
    def passes(self) -> int:
        return self.step

    def _parameters(self) -> Iterator[Parameter]:
        for bucket in self.buckets:
            yield from bucket.parameters.values()

    # -- what the kinds of flights differ in ---------------------------------------------------------------------------

    @abstractmethod
    def _offer(self, bucket: Bucket, presence: Presence) -> Tensor:
        """What leaves of a bucket: (n,)."""

    @abstractmethod
    def _land(self, flight: InFlightRound, arrival: RoundResult) -> None:
        """Use what was agreed upon."""

    @abstractmethod
    def _lost(self, flight: InFlightRound) -> None:
        """A rank's numbers were not finite, so nothing was agreed upon and nothing was remembered."""

    @abstractmethod
    def _averaged_state(self, fragment: int) -> AveragedState:
        """What is averaged along with a fragment, as it is."""

    def _used(self, fragment: Fragment, presence: Presence) -> Flags:
        """Which parameters the others should know to have a gradient here."""
        return NO_FLAGS

    # -- counting ------------------------------------------------------------------------------------------------------

    def _pass_over(self) -> None:
        if not self.muted and not self._within_closure:
            self._count()

    def rest(self) -> None:
        self._counted = False

    def _count(self) -> None:
        self._loop.scale()  # a step that the scaler skipped is over, which shows in it
        self.step += 1
        self._counted = True
        for fragment in self._fragments:
            fragment.weight += self.weight

    # -- launching -----------------------------------------------------------------------------------------------------

    def _boundary(self) -> None:
        """Everything that is due by now, in the order of its time."""
        while self._next.launch <= self.step:
            self._land_until(self._next.launch - 1)
            if self.stopping:
                return  # the others come to no further turn
            self._launch(Presence.TRAINING)
        self._land_until(self.step)

    @property
    def _next(self) -> SyncRound:
        return self._turn(self._number)

    def _turn(self, number: int) -> SyncRound:
        fragment, launch, landing = self._schedule.turn(number)
        return SyncRound(fragment, launch + self._start, landing + self._start)

    def _launch(self, presence: Presence, met: ScriptCost | None = None) -> None:
        """Let the next turn leave; `met`: where it was found out before who comes."""
        turn, fragment = self._next, self._fragments[self._next.fragment]
        weight, fragment.weight = fragment.weight, 0.0
        parcels = [
            OutgoingBucket(bucket, self._offer(bucket, presence), self.keeps_offers) for bucket in fragment.buckets
        ]
        numbers = self._averaged_state(turn.fragment).numbers()
        at = self._context.aggregation(self._number // len(self._fragments))
        keep = with_own if self.keeps_offers else without_own
        round_ = StepReduction(
            self._context.compressor, self._transport, fragment.names, at, self.reference, weight, keep=keep
        )
        settings = self._loop.settings()
        report = StepReport(
            weight=weight,
            presence=presence,
            settings=rng.address(settings),
            first_nonfinite=NOBODY,
            used=self._used(fragment, presence),
            moved=NO_FLAGS,
            stop=self.asked_to_stop,
        )
        closing = StepTrailer(report=report, settings=settings, buffers=())
        come = self._poll.ask(weight, self.step, presence) if met is None else lambda: met
        job = partial(self._fly, round_, parcels, numbers, closing, come, self._loop.batch())
        self._under_way.append(InFlightRound(self._number, turn, parcels, self._context.comm_thread.submit(job)))
        self._number += 1

    # -- on the lane ---------------------------------------------------------------------------------------------------

    def _fly(
        self,
        round_: StepReduction,
        parcels: Sequence[OutgoingBucket],
        averaged_state: Tensor | None,
        closing: StepTrailer,
        come: Callable[[], ScriptCost],
        batch: int,
    ) -> RoundResult:
        """Exchange one turn's parcels; what is remembered about them is committed here, before the next turn leaves."""
        met = come()
        meeting: Participants = met.result
        round_.spent.append(met)
        round_.reference, round_.total = self.reference, meeting.weight
        if self.keeps_offers:  # what was sent must mean the same at every turn, or taking it back would leave some
            round_.weight, round_.total = 1.0, float(self._transport.world)
        if self.reference is None:
            round_.open(batch, self._loop.warn)
            self.reference = round_.reference
        *before, last = parcels
        for parcel in before:
            round_.exchange(parcel, NO_INPUT, 1.0)
        mean = None if averaged_state is None else round_.average(averaged_state)
        verdict = round_.close(last, NO_INPUT, 1.0, closing)
        blame = round_.blame(verdict, parcels)
        if blame is None and mean is not None and not all_finite(mean):
            blame = None, "buffers"
        arrival = RoundResult(blame=blame, active=meeting.active, stop=verdict.stop, costs=round_.costs())
        if blame is not None or not round_.total > 0:
            return arrival
        for parcel, staged in zip(parcels, round_.staged, strict=True):
            parcel.bucket.state = staged.next_state.after(parcel.bucket.state)
        return replace(
            arrival,
            committed=True,
            means=[staged.mean for staged in round_.staged],
            owns=[staged.own if self.keeps_offers else None for staged in round_.staged],
            averaged_state=mean,
            used=verdict.used.tolist(),
        )

    # -- landing -------------------------------------------------------------------------------------------------------

    def _land_until(self, passes: int) -> None:
        while self._under_way and self._under_way[0].turn.landing <= passes:
            flight = self._under_way.popleft()
            asked = time.perf_counter()
            arrival = flight.ticket.wait()
            use_on_current_stream((*arrival.means, *arrival.owns, arrival.averaged_state))
            self._waited += time.perf_counter() - asked
            self._account(arrival)
            with torch.no_grad():
                if arrival.committed:
                    self._land(flight, arrival)
                else:
                    self._lost(flight)
            self._loop.judged(arrival.blame)

    def _account(self, arrival: RoundResult) -> None:
        self.stopping = self.stopping or arrival.stop
        self._add(not arrival.committed, arrival.costs)

    def _add(self, skipped: bool, costs: StepCosts) -> None:
        """Part of the step that ends with the boundary."""
        self._skipped = self._skipped or skipped
        for name, value in costs.items():
            self._costs[name] = self._costs.get(name, 0.0) + value

    def _tell(self) -> None:
        """A step is over."""
        costs = {"waiting_seconds": self._waited, **self._costs}
        skipped, self._waited, self._costs, self._skipped = self._skipped, 0.0, {}, False
        self._loop.ended(skipped, costs)

    # -- around the optimizer, and the epoch ---------------------------------------------------------------------------

    def before_step(self, *, closure: bool) -> None:
        self._within_closure = closure

    def after_step(self) -> None:
        if not self._counted:
            self._count()  # the step had no backward pass of its own, or many within it
        self._counted = self._within_closure = False
        self._boundary()
        self._tell()

    def end_epoch(self) -> int:
        """Ranks that are done come to the turns of the others, until all are done; then all stand at the same pass."""
        self._boundary()
        missed = 0
        while not self._stops_before(self._next.launch):
            fragment = self._fragments[self._next.fragment]
            met = self._ask(fragment.weight, Presence.OUT_OF_DATA)
            meeting: Participants = met.result
            if not meeting.active and meeting.together:
                return missed
            self.step = max(self.step, self._next.launch)
            self._land_until(self._next.launch - 1)
            self._launch(Presence.OUT_OF_DATA, met)
            self._land_until(self.step)
            self._tell()
            missed += meeting.active
            if not meeting.active or self.stopping:
                return missed
        return missed

    def _stops_before(self, launch: int) -> bool:
        """Whether the others stop when something lands, and do not come to the next turn."""
        for flight in list(self._under_way):
            if flight.turn.landing < launch and flight.ticket.wait().stop:
                self.step = max(self.step, flight.turn.landing)
                self._land_until(self.step)
        return self.stopping

    def meet_to_save(self) -> None:
        self._boundary()
        self._ask(0.0, Presence.SAVING)

    def _ask(self, weight: float, presence: Presence) -> ScriptCost:
        return self._poll.hear(weight, self.step, presence)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        self._await()

    def _await(self) -> None:
        for flight in self._under_way:
            flight.ticket.wait()  # it writes what the compressor remembers

    def remembered(self) -> NamedState:
        self._await()
        return state_by_name(self.buckets)

    def progress(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "turn": self._number,
            "reference": self.reference,
            "weights": [fragment.weight for fragment in self._fragments],
            "flights": [flight.written() for flight in self._under_way],
        }

    def resume(self, progress: Mapping[str, Any], remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._await()
        self.step, self._number, self.reference = progress["step"], progress["turn"], progress["reference"]
        for fragment, weight in zip(self._fragments, progress["weights"], strict=True):
            fragment.weight = weight
        self._counted = False
        self._under_way = deque(map(self._read, progress["flights"]))
        copy_state(remembered, self.remembered())

    def begin_at(self, step: int) -> None:
        self.step = max(step, self._start)
        while self._next.launch <= self.step:
            self._number += 1

    def _read(self, written: Mapping[str, Any]) -> InFlightRound:
        number = written["number"]
        turn = self._turn(number)
        buckets = self._fragments[turn.fragment].buckets
        offers = [offer.clone() for offer in written["offers"]] or [bucket.flat for bucket in buckets]
        parcels = [OutgoingBucket(*each, self.keeps_offers) for each in zip(buckets, offers, strict=True)]
        arrival = read_result(written)
        return InFlightRound(number, turn, parcels, self._context.comm_thread.submit(lambda: arrival))

    def adopt(self, before: Synchronizer) -> None:
        super().adopt(before)
        assert isinstance(before, ScheduledSynchronizer)
        self._number = before._number
        for mine, theirs in zip(self._fragments, before._fragments, strict=True):
            mine.weight = theirs.weight

    def close(self) -> None:
        self._passes_seen.close()
        self._poll.close()
