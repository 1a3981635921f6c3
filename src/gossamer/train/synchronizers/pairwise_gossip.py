"""Pairwise gossip: each worker averages its parameters with one neighbor at a time, asynchronously (AD-PSGD)."""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, reduce
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor

from gossamer import events
from gossamer.algorithms.gossip.final_mean import FinalMean
from gossamer.algorithms.gossip.partner import Partner, initiate
from gossamer.algorithms.gossip.state_transfer import ReceivedState, rejoin
from gossamer.algorithms.strategies import GossipStrategy, SyncRound
from gossamer.algorithms.topologies import Topology
from gossamer.base.layout import FlatTensors, accumulation_dtype, first_nonfinite
from gossamer.base.ops import Payload
from gossamer.base.peer_ops import PeerScript
from gossamer.comm.environment import comebacks
from gossamer.comm.environment.roll_call import session_calls
from gossamer.comm.environment.worker_registry import claim_end, has_ended, mark_end, mark_training
from gossamer.comm.packing import join, split
from gossamer.comm.runtime.peer_thread import PeerEndpoint, RunningScript, run_peer_script
from gossamer.errors import AttachError, GossamerError, LoopError, PeerLost, Stopped
from gossamer.train.engine.averaged_state import AveragedState
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.loop import LoopState
from gossamer.train.engine.parameter_views import copy_parameters
from gossamer.train.engine.step_decision import Presence
from gossamer.train.synchronizers.base import SyncContext, Synchronizer
from gossamer.train.synchronizers.local_step_counter import LocalStepCounter
from gossamer.train.synchronizers.peer_endpoints import (
    AllGatherText,
    close_now,
    connect_workers,
    reconnect_worker,
    relocate,
)
from gossamer.train.synchronizers.termination import TerminationProtocol

WIDEST_BYTES = 8
_trainings = count()  # number of sessions in this process so far


class PairwiseGossip(Synchronizer):
    """Averages with one neighbor whenever both are ready, and waits for other workers only at the end of the run.

    Each worker answers its peers at any time with the parameters that it published last, and starts an exchange of its
    own every `period` steps unless the previous one is still in progress. Results of both are added to the parameters
    after the next optimizer step. Statistics such as BatchNorm's remain local until the end, when all workers adopt
    the mean of everything, bit for bit. Frozen parameters that a script changes remain local.
    """

    in_step = False

    def __init__(
        self,
        strategy: GossipStrategy,
        topology: Topology,
        buckets: Sequence[Bucket],
        context: SyncContext,
        all_gather_text: AllGatherText,
    ) -> None:
        super().__init__()
        loop = context.loop
        if loop.scale() is not None:
            raise AttachError(
                "a GradScaler skips the same steps on all workers, but here each worker makes its own steps. Train in "
                'bfloat16, which needs no scaler, or write Gossip("symmetric").'
            )
        self._strategy, self._topology, self._buckets, self._loop = strategy, topology, buckets, loop
        self._rank, self._world = context.transport.rank, context.transport.world
        incarnation, parameters = comebacks(), self._named()
        numbers = sum(each.numel() for each in (*parameters.values(), *chain.from_iterable(loop.buffers())))
        if incarnation:
            self._me = reconnect_worker(self._rank, self._world, WIDEST_BYTES * numbers)
        else:
            self._me = connect_workers(self._rank, WIDEST_BYTES * numbers, all_gather_text)
        self._leave = weakref.finalize(self, close_now, self._me, os.getpid())  # at exit, too
        found = None
        if incarnation:
            others = nearest_first(topology, self._rank, self._world)
            found = take_over_state(self._me, others, parameters, loop, self._leave)
        start = pack_parameters(parameters)
        self._layout = start.layout
        self._partner = Partner(start, self._rank, context.compressor, context.seed, incarnation)
        self._partner.extra_state = partial(pack_statistics, loop)
        claim = partial(claim_end, next(_trainings))
        self._termination = TerminationProtocol(self._partner, self._world, claim, self._pack_state)
        self._number, self._exchanges = 0, dict[int, RunningScript]()
        self._own_state: Payload | None = None  # the statistics, while the model holds merged ones
        if found is None:
            self._me.start(self._termination.listen(partial(relocate, self._me)))
            self._termination.meet(self._me)
        else:
            self._go_on_from(found)
        mark_training(self._rank, incarnation)
        self.roll_call = session_calls(self._rank, self._world, lambda: self._partner.left)
        self._sent_bytes = self._all_sent_bytes()
        self._local = LocalStepCounter(self.controls, loop, self._rank, buckets, self._count)

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self._buckets

    def _go_on_from(self, found: ReceivedState) -> None:
        """Continue at the step of the worker that the parameters came from, and inform the others."""
        self._partner.mark_gone(*(peer for peer in range(self._world) if peer != self._rank))  # until they answer
        self.begin_at(found.status.steps)
        self._me.start(self._termination.listen(partial(relocate, self._me)))
        self._termination.meet_again(self._me, found.status.here, json.dumps(self._me.address))
        events.notice(
            f"worker {self._rank} returned and continues from the parameters of worker {found.peer} after "
            f"{found.status.steps} steps; its optimizer state is reset"
        )

    def _named(self) -> dict[str, Tensor]:
        return {name: p.detach() for bucket in self._buckets for name, p in bucket.parameters.items()}

    def _following(self) -> AbstractContextManager[None]:
        return self._loop.copies.following(p for bucket in self._buckets for p in bucket.parameters.values())

    # -- local steps ---------------------------------------------------------------------------------------------------

    def _count(self) -> None:
        self.step += 1
        self._local.drop_nonfinite()

    def before_step(self, *, closure: bool) -> None:
        self._local.before_step(closure=closure)

    def after_step(self) -> None:
        self._local.after_step()
        self._drain()
        self._termination.steps = self.step
        due = False
        while self._next.launch <= self.step:
            self._number, due = self._number + 1, True
        if due:
            self._begin()
        sent = self._all_sent_bytes()
        self._local.add(False, {"bytes_sent": sent - self._sent_bytes})
        self._sent_bytes = sent
        self._local.report()
        self._stop_together()

    @property
    def _next(self) -> SyncRound:
        return self._strategy.schedule.sync_round(self._number)

    def _all_sent_bytes(self) -> int:
        """Payload bytes sent in exchanges that this worker started or answered."""
        return sum(each.payload_bytes_sent for each in self._me.statistics().values())

    def _stop_together(self) -> None:
        """Pass a stop request on to the other workers, which receive it at different steps."""
        if self.asked_to_stop and not self.stopping:
            self._termination.stop(self._me)
        self.stopping = self.stopping or self.asked_to_stop or self._termination.must_stop

    # -- exchanges -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _drain(self) -> None:
        """Apply the results of exchanges, and publish the current parameters."""
        with self._following(), self._local.waiting():  # for a thread that encodes or decodes a message
            self._partner.drain_each(list(self._named().values()))

    def _begin(self) -> None:
        """Start an exchange, unless one is in progress: then this sync round is skipped."""
        self._collect()
        nonfinite = first_nonfinite(FlatTensors(self._partner.shown, self._layout))
        self._loop.judged("exchange", None if nonfinite is None else (self._rank, nonfinite))
        if nonfinite is not None or not all(map(self._partner.is_gone, self._exchanges)):
            return
        if (peer := self._partner.neighbor(self._topology, self._world, self._number)) is not None:
            self._exchanges[peer] = self._me.start(_timed(initiate(self._partner, peer, self._number)))

    def _collect(self) -> None:
        """Remove completed exchanges. One with a worker that left remains: that worker may return and complete it."""
        for peer in [peer for peer, exchange in self._exchanges.items() if exchange.landed()]:
            self._end(self._exchanges.pop(peer), peer)

    def _end(self, exchange: RunningScript, peer: int) -> None:
        try:
            self._local.add(False, {"wire_seconds": self._termination.wait(exchange, peer) or 0.0})
        except PeerLost:
            pass  # it remains open in the partner, which repeats the request
        except GossamerError as failure:
            events.notice(f"an exchange with worker {peer} failed. {failure}")

    # -- all workers together ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def merge(self) -> Mapping[str, Tensor]:
        """Return the mean of the parameters that live workers published last. They continue training, so the result
        changes over time; all workers get the same result only while none trains."""
        if self._own_state is None:  # otherwise the model holds merged parameters, and these are restored
            self._drain()
        return self._published(self._termination.now(self._me))

    def _averaged_state(self) -> AveragedState:
        return AveragedState.of(self._loop.averaged())

    @contextmanager
    def swapping(self) -> Iterator[None]:
        """Answer with this worker's statistics within the block, too: others may still be computing their mean."""
        before, self._own_state = self._own_state, self._pack_state()
        try:
            yield
        finally:
            self._own_state = before

    def _pack_state(self) -> Payload:
        """A copy of the statistics on the CPU; some may be a step ahead of the published parameters."""
        if (own := self._own_state) is not None:
            return own
        numbers = self._averaged_state().numbers()
        return () if numbers is None else (numbers.cpu(),)

    def _published(self, agreed: FinalMean) -> Mapping[str, Tensor]:
        events.emit(events.Logged(step=self.step, values={"consensus_distance": agreed.distance}))
        parameters, *state = agreed.payload
        found = dict(FlatTensors(parameters, self._layout).items())
        return {**found, **self._averaged_state().named(state[0])} if state else found

    def end_epoch(self) -> int:
        """Do not wait: this worker continues to answer, and the others continue training."""
        self._stop_together()
        return 0

    @torch.no_grad()
    def end_run(self) -> None:
        """Wait until all live workers have finished, and adopt the mean of all."""
        self.end_calls()
        for peer, exchange in self._exchanges.items():
            self._end(exchange, peer)
        self._drain()
        agreed = self._termination.end(self._me, self._pack_state())
        mark_end()
        with self._following():
            copy_parameters(self._published(agreed), self._named())
        for state in agreed.payload[1:]:
            self._averaged_state().replace(state, 0.0)

    def close(self) -> None:
        self.end_calls()
        self._local.close()
        self._leave()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def meet_to_save(self, call: Presence = Presence.SAVING) -> None:
        raise LoopError(
            "with pairwise gossip workers are never at the same step, and parts of exchanges that only one side has "
            "applied would be missing. To keep the model, save it on one rank: `with "
            "session.averaged_parameters(model): torch.save(model.state_dict(), path)`; for checkpoints write "
            'Gossip("symmetric").'
        )

    def flush(self) -> None:
        raise LoopError(
            "other workers average these parameters in the shapes they had at attach. Call session.close() and "
            "gossamer.attach(...) again."
        )

    def resume(self, progress: Mapping[str, Any], remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.meet_to_save()

    def begin_at(self, step: int) -> None:
        self.step, self._number = step, step // self._strategy.period
        self._termination.steps = step

    def restart(self) -> None:
        self._drain()  # replaces the published parameters


def _timed(script: PeerScript) -> PeerScript:
    """Run the script, and return its duration in seconds."""
    began = time.perf_counter()
    yield from script
    return time.perf_counter() - began


# -- a worker that returns starts from the state of another worker ----------------------------------------------------


@torch.no_grad()
def take_over_state(
    me: PeerEndpoint,
    others: Sequence[int],
    parameters: Mapping[str, Tensor],
    loop: LoopState,
    leave: Callable[[], object],
) -> ReceivedState:
    """Overwrite parameters and statistics with those of the first live worker of `others`; the own state was lost.

    Raises:
        Stopped: all workers have finished the run; raised after `leave`.
        PeerLost: no other worker is left.
    """
    start = pack_parameters(parameters)
    shown = start.flat.to(accumulation_dtype(start.flat.dtype))
    try:
        found: ReceivedState = run_peer_script(rejoin(others, (shown, *pack_statistics(loop)), has_ended), me)
    except PeerLost:
        if not has_ended():
            raise
        raise _too_late(me, leave) from None
    if found.status.agreed:
        raise _too_late(me, leave)
    copy_parameters(dict(FlatTensors(found.state[0], start.layout).items()), parameters)
    unpack_statistics(loop, found.state[1:])
    return found


def nearest_first(topology: Topology, rank: int, world: int) -> list[int]:
    """All other workers, neighbors first."""
    near = [peer for peer in topology.peers(rank, world) if peer != rank]
    return [*near, *(peer for peer in range(world) if peer not in (*near, rank))]


def _too_late(me: PeerEndpoint, leave: Callable[[], object]) -> Stopped:
    leave()
    number = me.me.number
    events.notice(f"worker {number} returned after the other workers had finished the run; it exits")
    return Stopped()


def pack_parameters(parameters: Mapping[str, Tensor]) -> FlatTensors:
    """Concatenate all parameters on the CPU: (n,), in the widest dtype of any of them."""
    dtype = reduce(torch.promote_types, (each.dtype for each in parameters.values()))
    return FlatTensors.pack({name: each.to("cpu", dtype) for name, each in parameters.items()})


def pack_statistics(loop: LoopState) -> Payload:
    """Copy all buffers of the model as bytes: one tensor, (m,) of uint8, or nothing. Some may be a step ahead."""
    held = tuple(each.detach().to("cpu", copy=True) for each in chain.from_iterable(loop.buffers()))
    return (join(held),) if held else ()


def unpack_statistics(loop: LoopState, taken: Payload) -> None:
    """Overwrite the buffers with the result of `pack_statistics` on another worker."""
    held = tuple(chain.from_iterable(loop.buffers()))
    for joint in taken:
        for own, peer_parts in zip(held, split(joint, held), strict=True):
            own.copy_(peer_parts)
