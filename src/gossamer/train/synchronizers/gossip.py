"""Gossip averaging: each worker averages parameters with its neighbors in a topology, in lock step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from gossamer import events
from gossamer.algorithms.gossip.rules import MASS
from gossamer.algorithms.strategies import GossipStrategy, SyncRound
from gossamer.algorithms.topologies import Topology
from gossamer.base.layout import FlatTensors, Layout, first_nonfinite
from gossamer.base.ops import AllGather, AllReduceMean, Coalesced, Payload, Script
from gossamer.base.runner import run_script
from gossamer.comm.runtime.comm_streams import use_on_current_stream
from gossamer.errors import GossamerError
from gossamer.train.checkpoint.state import AGREED_KEY
from gossamer.train.engine.averaged_state import AveragedState
from gossamer.train.engine.bucket import Bucket, copy_state, state_by_name
from gossamer.train.engine.bucket_reduction import sum_costs
from gossamer.train.engine.frozen_parameters import gather_moved
from gossamer.train.engine.step_decision import Presence, gather_first_batches
from gossamer.train.synchronizers.base import NamedState, SyncContext, Synchronizer
from gossamer.train.synchronizers.gossip_round import (
    MixedTensors,
    NeighborGraph,
    RoundHeader,
    gossip_round,
    renewed,
)
from gossamer.train.synchronizers.local_step_counter import LocalStepCounter

PREFIX = "mixing."  # of a rule's keys in checkpoints, next to a compressor's
BUFFERS = "buffers"
LOST = -1  # the number of no member


class GossipAveraging(Synchronizer):
    """Averages parameters with neighbors every `period` steps, after the optimizer step.

    A round is one neighbor all-gather. Every `rounds_apart` rounds it is combined with an all-gather among all workers.
    Until then, a rank that is out of data continues to join its neighbors' rounds, and a run that is to stop continues.
    A rank that needs all workers at the same step (to save, to merge) reports this in place of a round, in which
    nothing is mixed; a neighbor that continues training raises LoopError.

    In an elastic run all workers exchange headers after the messages of every round, which then counts for all of them
    or for none. The rule's state belongs to `_members`; when the workers have changed, the next exchange renews it.
    """

    in_common = False

    def __init__(
        self,
        strategy: GossipStrategy,
        topology: Topology,
        buckets: Sequence[Bucket],
        context: SyncContext,
        start: int = 0,
    ) -> None:
        super().__init__()
        self.step = self._start = start
        self._strategy, self._topology, self._rule = strategy, topology, strategy.rule(context.compressor)
        self._buckets, self._context, self._loop, self._transport = buckets, context, context.loop, context.transport
        self._rule.check(topology, self._transport.world, context.seed)
        self._number, self._looked = 0, -1
        self._merged: dict[str, Tensor] | None = None
        self._awaited = False  # new workers are to be admitted before the next step is counted
        self._start_over()
        rank, comm_thread = self._transport.rank, context.comm_thread
        self._local = LocalStepCounter(self.controls, self._loop, rank, buckets, self._count, comm_thread=comm_thread)

    def _start_over(self) -> None:
        """Initialize the state of the mixing rule. All workers have the same parameters and buffers."""
        self._memory = {bucket: self._rule.begin(bucket.gather_parameters()) for bucket in self._buckets}
        self._members = self._current_members
        self._begin_state()

    def _begin_state(self) -> None:
        numbers = self._averaged_state().numbers()
        self._along = {} if numbers is None else self._rule.along.begin(numbers)

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    @property
    def between_steps(self) -> bool:
        return self._local.between_steps

    @property
    def agreed(self) -> Mapping[str, Tensor] | None:
        return self._merged

    def _averaged_state(self) -> AveragedState:
        return AveragedState.of(self._loop.averaged())

    def _look(self) -> None:
        """Before some rounds, compare the frozen parameters of all ranks; those that changed are mixed from then on."""
        frozen = self._loop.frozen
        if not frozen.looked_at(self._number) or self._looked == self._number:
            return
        self._looked, before = self._number, frozen.names
        moved = frozen.moved()
        gathered = self._context.comm_thread.exchange(lambda: run_script(gather_moved(moved), self._transport)).wait()
        frozen.average(gathered.result, gives_notice=self._transport.rank == 0)
        if frozen.names != before:
            self._begin_state()

    # -- local steps ---------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        self._admit()
        self.step += 1
        self._merged = None
        if self._loop.scale() is None:
            self._local.drop_nonfinite()

    def before_step(self, *, closure: bool) -> None:
        self._local.before_step(closure=closure)

    def after_step(self) -> None:
        self._local.after_step()
        self._mix_due()
        self._local.report()

    @property
    def _next(self) -> SyncRound:
        fragment, launch, landing = self._strategy.schedule.sync_round(self._number)
        return SyncRound(fragment, launch + self._start, landing + self._start)

    # -- rounds --------------------------------------------------------------------------------------------------------

    def _mix_due(self) -> None:
        while self._next.launch <= self.step and not self.stopping:
            self._mix(Presence.TRAINING)

    @torch.no_grad()
    def _mix(self, presence: Presence) -> bool:
        """Make a round. Returns whether a rank continues training, as far as this rank knows."""
        self._look()
        nonfinite, headers, parts = self._run(partial(self._round_headers, self._parts(), presence))
        for part in parts:
            assert part.mixed is not None
            self._write(part, part.mixed)
        self._number += 1
        self._merged, self._awaited = None, self._context.comm_thread.is_awaited
        self.stopping = self.stopping or any(header.stop for header in headers)
        self._loop.judged("exchange", None if nonfinite is None else (self._transport.rank, nonfinite))
        return not headers or any(header.presence == Presence.TRAINING for header in headers)

    @torch.no_grad()
    def _meet(self, call: Presence) -> None:
        """Check that all ranks make the same call now. Raises LoopError otherwise."""
        self._look()
        self._run(partial(self._round, self._parts(), call))

    def _parts(self) -> list[MixedTensors]:
        parts = [
            MixedTensors(
                self._rule, FlatTensors(bucket.gather_parameters(), bucket.layout), self._memory[bucket], bucket
            )
            for bucket in self._buckets
        ]
        numbers = self._averaged_state().numbers()
        if numbers is not None:
            parts.append(
                MixedTensors(self._rule.along, FlatTensors(numbers, Layout.of({BUFFERS: numbers})), self._along)
            )
        return parts

    def _write(self, part: MixedTensors, numbers: Tensor) -> None:
        use_on_current_stream([numbers])
        if part.bucket is None:
            self._averaged_state().replace(numbers, 0.0)
        else:
            with self._loop.copies.following(part.bucket.parameters.values()):
                part.bucket.scatter_parameters(numbers)

    def _run(self, script: Callable[[], Script], *, admits: bool = False) -> Any:
        """Run a script as a transaction, for which `script` is called again if the workers change within it."""
        with self._local.waiting():
            job = lambda: run_script(script(), self._transport)  # noqa: E731
            performed = self._context.comm_thread.exchange(job, admits=admits).wait()
        self._local.add(False, sum_costs([performed]))
        return performed.result

    def _round_headers(
        self, parts: Sequence[MixedTensors], presence: Presence
    ) -> Generator[Any, Any, tuple[str | None, Sequence[RoundHeader], Sequence[MixedTensors]]]:
        """Returns the first non-finite tensor before the round, all headers, and the parts after it. On the
        communication thread, since it waits for the GPU."""
        nonfinite = next(filter(None, (first_nonfinite(part.x) for part in parts)), None)
        headers, mixed = yield from self._round(parts, presence)
        return nonfinite, headers, mixed

    def _round(
        self, parts: Sequence[MixedTensors], presence: Presence
    ) -> Generator[Any, Any, tuple[Sequence[RoundHeader], Sequence[MixedTensors]]]:
        if self.reference is None:
            self._loop.warn((yield from gather_first_batches(self._loop.now().first_batch, self.controls.weight)))
        parts = yield from self._renewed(parts)
        at = self._context.aggregation(self._number)
        header = RoundHeader(self._number, self.step, presence, self.asked_to_stop)
        due = (self._number + 1) % self._strategy.rounds_apart(at.world) == 0
        graph, atomic = NeighborGraph(self._topology, at), not self._context.comm_thread.is_fixed
        headers = yield from gossip_round(parts, header, graph, all_meet=due, atomic=atomic)
        self.reference = 1.0
        self._keep(parts)
        return headers, parts

    # -- workers that join or are lost ---------------------------------------------------------------------------------

    @property
    def _current_members(self) -> Sequence[int]:
        return self._context.comm_thread.members(self._transport.world)

    def _renewed(self, parts: Sequence[MixedTensors]) -> Generator[Any, Any, Sequence[MixedTensors]]:
        """The parts with which this exchange continues: renewed if the workers have changed since the last one."""
        members = self._current_members
        if members == self._members:
            return parts
        self._rule.check(self._topology, len(members), self._context.seed)
        new = [each not in self._members for each in members]
        return (yield from renewed(parts, len(members), joined=any(new), new=new[self._transport.rank]))

    def _keep(self, parts: Sequence[MixedTensors]) -> None:
        """Keep the state of renewed parts. In an elastic run no operation of the exchange follows, so it counts."""
        if self._members != (members := self._current_members):
            self._memory = {part.bucket: part.memory for part in parts if part.bucket is not None}
            self._along = next((part.memory for part in parts if part.bucket is None), {})
            self._members = members

    @torch.no_grad()
    def _admit(self, *, admits: bool = True) -> None:
        """Admit new workers once the step is complete for the loop as well (it may step a scheduler after the
        optimizer). All ranks call it after the same round; new workers at once, as their first exchange."""
        if self._awaited:
            self._awaited = False
            self._run(self._admission, admits=admits)

    def take_place(self, rank: int, world: int) -> None:
        """Each worker compresses independently, so no state depends on its place."""

    def joined(self) -> None:
        for part in self._run(self._admission):
            self._write(part, part.x.flat)
        self._awaited = False

    def _admission(self) -> Generator[Any, Any, Sequence[MixedTensors]]:
        parts = yield from self._renewed(self._parts())
        yield AllGather((parts[0].x.flat.new_zeros(1),))  # ends the transaction, also if nothing was renewed
        self._merged = None
        self._keep(parts)
        return parts

    def handed_over(self) -> dict[str, Any]:
        """Without the rule's state: a new worker receives the means of all workers in its first exchange."""
        number = {"step": self.step, "round": self._number, "looked": self._looked, "reference": self.reference}
        return {**number, "frozen": self._loop.frozen.names, "members": list(self._members)}

    def take_up(self, handed: Mapping[str, Any]) -> None:
        self.step, self._number, self.reference = handed["step"], handed["round"], handed["reference"]
        self._loop.frozen.resume(handed["frozen"])
        self._looked, self._merged = handed["looked"], None
        self._start_over()
        self._members = tuple(handed["members"])
        self._local.rest()

    # -- all workers together ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def merge(self) -> Mapping[str, Tensor]:
        """Return the exact mean over all workers; log this rank's distance to it as consensus_distance."""
        if self._merged is None:
            self._meet(Presence.MERGING)
            self._merged, distance = self._run(self._mean)
            use_on_current_stream(self._merged.values())
            events.emit(events.Logged(step=self.step, values={"consensus_distance": distance}))
        return self._merged

    def _mean(self) -> Generator[Any, Any, tuple[dict[str, Tensor], float]]:
        agreed: dict[str, Tensor] = {}
        away = torch.zeros(1, dtype=torch.float64, device=self._buckets[0].flat.device)
        for bucket in self._buckets:
            own = bucket.gather_parameters()
            shares = self._rule.shares(own, self._memory[bucket])
            means = yield Coalesced(tuple(AllReduceMean(share.clone()) for share in shares))
            mean = self._rule.whole(tuple(means)).to(own.dtype)
            away += (own - mean).double().square().sum()
            agreed |= {slot.name: slot.view(mean) for slot in bucket.layout}
        state = self._averaged_state()
        if (numbers := state.numbers()) is not None:
            means = yield Coalesced(tuple(AllReduceMean(each.clone()) for each in self._shares_of_state(numbers)))
            agreed |= state.named(self._rule.along.whole(tuple(means)))
        squared: Tensor = yield AllReduceMean(away)
        return agreed, sqrt(squared.item())

    def _shares_of_state(self, numbers: Tensor) -> Payload:
        return self._rule.along.shares(numbers, self._along)

    def end_run(self) -> None:
        with suppress(GossamerError):
            self.merge()

    def end_epoch(self) -> int:
        """Join the neighbors' rounds until no worker trains; all workers are then at the same pass."""
        training = True
        while training and not self.stopping:
            self._admit(admits=False)  # new workers have a whole epoch of data, this rank has none
            self.step = max(self.step, self._next.launch)
            training = self._mix(Presence.OUT_OF_DATA)
            self._local.report()
        return 0

    def meet_to_save(self, call: Presence = Presence.SAVING) -> None:
        self._meet(call)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def remembered(self) -> NamedState:
        """Compressor state and mixing state, with shares that have the mean from which other worker counts start."""
        found = state_by_name(self._buckets)
        for bucket, memory in self._memory.items():
            share, *_ = self._rule.shares(bucket.gather_parameters(), memory)
            for name, view in FlatTensors(share, bucket.layout).items():
                found.setdefault(name, {})[AGREED_KEY] = view
            for key, tensor in memory.items():
                of_all = dict.fromkeys(bucket.layout.names, tensor)
                views = of_all if key == MASS else dict(FlatTensors(tensor, bucket.layout).items())
                for name, view in views.items():
                    found[name][PREFIX + key] = view
        return found

    def progress(self) -> dict[str, Any]:
        place = {"step": self.step, "round": self._number, "reference": self.reference}
        state = {
            "frozen": self._loop.frozen.names,
            "agreed_state": self._averaged_state().held(),
            "outdated": self._members != self._current_members,
        }
        return {**place, "along": dict(self._along), **state}

    def resume(self, progress: Mapping[str, Any], remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.step, self._number, self.reference = progress["step"], progress["round"], progress["reference"]
        self._loop.frozen.resume(progress.get("frozen", ()))
        self._begin_state()
        saved = progress["along"]
        if all(saved[key].shape == tensor.shape for key, tensor in self._along.items()):  # else of an earlier version
            self._along = {key: saved[key].clone() for key in self._along}
        self._members = self._current_members
        if progress.get("outdated", False):  # workers were lost since the last exchange before it was saved
            self._members = (*self._members, LOST)
        self._local.rest()
        self._merged = None
        copy_state(remembered, self.remembered())

    def begin_at(self, step: int) -> None:
        self.step, self._number = step, (step - self._start) // self._strategy.period

    @torch.no_grad()
    def restart(self) -> None:
        self._start_over()

    def take_over_from(self, before: Synchronizer) -> None:
        super().take_over_from(before)
        assert isinstance(before, GossipAveraging)
        self._number, self._along = before._number, before._along

    def close(self) -> None:
        self._local.close()
