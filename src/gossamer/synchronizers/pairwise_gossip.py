"""Parameters that are averaged with one neighbour at a time, while every worker goes at its own pace."""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gossamer import events
from gossamer.core.layout import FlatTensors, accumulation_dtype, first_nonfinite
from gossamer.core.ops import Payload
from gossamer.core.peer_ops import PeerScript
from gossamer.environment import comebacks
from gossamer.environment.worker_registry import has_ended, mark_end, mark_training
from gossamer.errors import AttachError, GossamerError, LoopError, PeerLost, Stopped
from gossamer.gossip.pairwise import Partner
from gossamer.gossip.pairwise_scripts import initiate
from gossamer.gossip.state_transfer import ReceivedState, rejoin
from gossamer.gossip.termination import FinalMean, TerminationProtocol
from gossamer.reducer.averaged_state import AveragedState
from gossamer.reducer.backward_hooks import BackwardMonitor, drop_nonfinite_gradients
from gossamer.reducer.bucket import Bucket
from gossamer.reducer.parameter_views import copy_parameters
from gossamer.runtime.peer_thread import PeerEndpoint, PeerThread, run_peer_script
from gossamer.strategies import GossipStrategy, SyncRound
from gossamer.synchronizers.base import LoopState, NamedState, SyncContext, Synchronizer
from gossamer.synchronizers.peer_endpoints import Tell, close_now, connect_workers, reconnect_worker, relocate
from gossamer.topologies import Topology
from gossamer.transports.packing import join, split

WIDEST_BYTES = 8


class PairwiseGossip(Synchronizer):
    """Lets workers average with a neighbour whenever they are ready for it, and wait for nobody until the end.

    Each worker answers others at any time, from what it has shown last, and begins an exchange of its own every
    `period` backward passes, unless its last one is still under way. What came of both is added to the parameters
    after the next step of the optimizer. Statistics such as BatchNorm's stay each worker's own until the end, in which
    all take the mean of everything, the same bits.
    """

    in_step = False

    def __init__(
        self,
        strategy: GossipStrategy,
        topology: Topology,
        buckets: Sequence[Bucket],
        context: SyncContext,
        tell: Tell,
    ) -> None:
        super().__init__()
        loop = context.loop
        if loop.scale() is not None:
            raise AttachError(
                "a GradScaler skips steps of all workers alike, and here each makes its own. Train in bfloat16, which "
                'needs no scaler, or write Gossip("symmetric").'
            )
        self._strategy, self._topology, self._buckets, self._loop = strategy, topology, buckets, loop
        self._rank, self._world = context.transport.rank, context.transport.world
        life = comebacks()
        numbers = sum(each.numel() for each in (*self._named().values(), *chain.from_iterable(loop.buffers())))
        self._me = self._assembled(life, WIDEST_BYTES * numbers, tell)
        self._leave = weakref.finalize(self, close_now, self._me, os.getpid())  # at exit, too
        found = self._take_over() if life else None
        start = _start(self._named())
        self._layout, self._partner = start.layout, Partner(start, self._rank, context.compressor, context.seed, life)
        self._partner.beside = partial(_statistics, loop)
        self._termination = TerminationProtocol(self._partner, self._world)
        self._number, self._talks = 0, dict[int, PeerThread]()
        if found is None:
            self._me.start(self._termination.listen(partial(relocate, self._me)))
            self._termination.meet(self._me)
        else:
            self._go_on_from(found)
        mark_training(self._rank, life)
        self._counted = self._within_closure = self._skipped = False
        self._waited = self._spent = 0.0
        self._sent_bytes = self._all_sent_bytes()
        self._passes_seen = BackwardMonitor(
            chain.from_iterable(each.parameters.values() for each in buckets), self._pass_over
        )

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    @property
    def passes(self) -> int:
        return self.step

    # -- coming back ---------------------------------------------------------------------------------------------------

    def _assembled(self, life: int, largest_bytes: int, tell: Tell) -> PeerEndpoint:
        if life:
            return reconnect_worker(self._rank, self._world, largest_bytes)
        return connect_workers(self._rank, largest_bytes, tell)

    @torch.no_grad()
    def _take_over(self) -> ReceivedState:
        """Overwrite parameters and statistics with what a worker has that is here, neighbours first: what this one had
        is lost. Raises Stopped where all have come to the end, and PeerLost where nobody is left."""
        start = _start(self._named())
        near = [peer for peer in self._topology.peers(self._rank, self._world) if peer != self._rank]
        others = [*near, *(peer for peer in range(self._world) if peer not in (*near, self._rank))]
        shown = start.flat.to(accumulation_dtype(start.flat.dtype))
        try:
            found: ReceivedState = run_peer_script(
                rejoin(others, (shown, *_statistics(self._loop)), has_ended), self._me
            )
        except PeerLost:
            if not has_ended():
                raise
            raise self._too_late() from None
        if found.roll.agreed:
            raise self._too_late()
        copy_parameters(dict(FlatTensors(found.state[0], start.layout).items()), self._named())
        _take_statistics(self._loop, found.state[1:])
        return found

    def _too_late(self) -> Stopped:
        self._leave()
        events.notice(f"worker {self._rank} came back when the others had come to the end: nothing is left to be done")
        return Stopped()

    def _go_on_from(self, found: ReceivedState) -> None:
        """Take part again, at the step of whose parameters were taken over; from now on the others hear of this one."""
        self._partner.gone.update(peer for peer in range(self._world) if peer != self._rank)  # until they are heard
        self.begin_at(found.roll.steps)
        self._me.start(self._termination.listen(partial(relocate, self._me)))
        self._termination.meet_again(self._me, found.roll.here, json.dumps(self._me.address))
        events.notice(
            f"worker {self._rank} came back and goes on from what worker {found.peer} has after {found.roll.steps} "
            "steps; its optimizer begins anew"
        )

    def _named(self) -> dict[str, Tensor]:
        return {name: p.detach() for bucket in self._buckets for name, p in bucket.parameters.items()}

    # -- counting ------------------------------------------------------------------------------------------------------

    def _pass_over(self) -> None:
        if not self.muted and not self._within_closure:
            self._count()

    def _count(self) -> None:
        self.step += 1
        self._counted = True
        spoilt = drop_nonfinite_gradients(self._buckets)
        self._skipped = self._skipped or spoilt is not None
        self._loop.guarded(None if spoilt is None else (self._rank, spoilt))

    def rest(self) -> None:
        self._counted = False

    def before_step(self, *, closure: bool) -> None:
        self._within_closure = closure

    def after_step(self) -> None:
        if not self._counted:
            self._count()  # the step had no backward pass of its own, or many within it
        self._counted = self._within_closure = False
        self._drain()
        self._termination.steps = self.step
        due = False
        while self._next.launch <= self.step:
            self._number, due = self._number + 1, True
        if due:
            self._begin()
        self._tell()
        self._stop_together()

    @property
    def _next(self) -> SyncRound:
        return self._strategy.schedule.turn(self._number)

    def _tell(self) -> None:
        sent = self._all_sent_bytes()
        costs = {"waiting_seconds": self._waited, "wire_seconds": self._spent, "bytes_sent": sent - self._sent_bytes}
        skipped, self._sent_bytes, self._waited, self._spent, self._skipped = self._skipped, sent, 0.0, 0.0, False
        self._loop.ended(skipped, costs)

    def _all_sent_bytes(self) -> int:
        """Payload bytes, of exchanges that this worker began or answered."""
        return sum(each.payload_bytes_sent for each in self._me.statistics().values())

    def _stop_together(self) -> None:
        """Whoever is asked to stop asks the others, which hear of it at different steps."""
        if self.asked_to_stop and not self.stopping:
            self._termination.stop(self._me)
        self.stopping = self.stopping or self.asked_to_stop or self._termination.told_to_stop

    # -- exchanges -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _drain(self) -> None:
        """Take what exchanges came to, and show what this worker has now."""
        asked = time.perf_counter()
        self._partner.drain_each(list(self._named().values()))
        self._waited += time.perf_counter() - asked  # for a conversation that reads or writes a letter

    def _begin(self) -> None:
        """Begin an exchange, unless one is under way: then this turn is left out."""
        self._collect()
        spoilt = first_nonfinite(FlatTensors(self._partner.shown, self._layout))
        self._loop.judged(None if spoilt is None else (self._rank, spoilt))
        if spoilt is not None or any(peer not in self._partner.gone for peer in self._talks):
            return
        if (peer := self._partner.neighbor(self._topology, self._world, self._number)) is not None:
            self._talks[peer] = self._me.start(_timed(initiate(self._partner, peer, self._number)))

    def _collect(self) -> None:
        """Forget exchanges that have ended. One with a worker that left stays: it may come back and end it."""
        for peer in [peer for peer, talk in self._talks.items() if talk.landed()]:
            self._end(self._talks.pop(peer), peer)

    def _end(self, talk: PeerThread, peer: int) -> None:
        try:
            self._spent += self._termination.wait(talk, peer) or 0.0
        except PeerLost:
            pass  # it stays open in the partner, which asks again
        except GossamerError as failure:
            events.notice(f"an exchange with worker {peer} did not take place. {failure}")

    # -- all workers together ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def merge(self) -> Mapping[str, Tensor]:
        """The mean of what the workers that are here have shown last. Others go on meanwhile, and who asks a moment
        later hears another; all hear the same only while nobody trains."""
        self._drain()
        return self._published(self._termination.now(self._me))

    def _published(self, agreed: FinalMean) -> Mapping[str, Tensor]:
        events.emit(events.Logged(step=self.step, values={"consensus_distance": agreed.distance}))
        return dict(FlatTensors(agreed.payload[0], self._layout).items())

    def end_epoch(self) -> int:
        """Nobody waits for anybody: this worker goes on answering, and the others go on training."""
        self._stop_together()
        return 0

    @torch.no_grad()
    def depart(self) -> None:
        """Wait until all workers that are here have come to the end, and take the mean of all."""
        for peer, talk in self._talks.items():
            self._end(talk, peer)
        self._drain()
        averaged_state = AveragedState(self._loop.averaged())
        numbers = averaged_state.numbers()
        agreed = self._termination.end(self._me, () if numbers is None else (numbers.cpu(),))
        mark_end()
        copy_parameters(self._published(agreed), self._named())
        if numbers is not None:
            averaged_state.replace(agreed.payload[1], 0.0)

    def close(self) -> None:
        self._passes_seen.close()
        self._leave()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def meet_to_save(self) -> None:
        raise LoopError(
            "with pairwise gossip workers never stand at the same step, and what one has given and another not yet "
            "taken would be missing. To keep the model, save it on one rank: `with session.merged(model): "
            'torch.save(model.state_dict(), path)`; for checkpoints write Gossip("symmetric").'
        )

    def arrive(self) -> None:
        raise LoopError("others average with these parameters in the shapes they had at attach. Attach a new session.")

    def remembered(self) -> NamedState:
        return {}

    def progress(self) -> dict[str, Any]:
        return {"step": self.step}

    def resume(self, progress: Mapping[str, Any], remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.meet_to_save()

    def begin_at(self, step: int) -> None:
        self.step, self._number = step, step // self._strategy.period
        self._termination.steps = step

    def restart(self) -> None:
        self._drain()  # so that nobody is shown the parameters of before any longer


def _start(parameters: Mapping[str, Tensor]) -> FlatTensors:
    """All side by side, on the CPU: (n,), in the widest dtype that any of them has."""
    dtype = reduce(torch.promote_types, (each.dtype for each in parameters.values()))
    return FlatTensors.pack({name: each.to("cpu", dtype) for name, each in parameters.items()})


def _statistics(loop: LoopState) -> Payload:
    """A copy of all the model's buffers, as bytes: one tensor, (m,) of uint8, or none. Some may be a step ahead."""
    held = tuple(each.detach().to("cpu", copy=True) for each in chain.from_iterable(loop.buffers()))
    return (join(held),) if held else ()


def _take_statistics(loop: LoopState, taken: Payload) -> None:
    """Overwrite the buffers with what `_statistics` gave elsewhere."""
    held = tuple(chain.from_iterable(loop.buffers()))
    for joint in taken:
        for mine, theirs in zip(held, split(joint, held), strict=True):
            mine.copy_(theirs)


def _timed(script: PeerScript) -> PeerScript:
    """The same; returns how many seconds it took."""
    began = time.perf_counter()
    yield from script
    return time.perf_counter() - began
