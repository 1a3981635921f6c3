"""Rejoin: a worker that was lost begins its next incarnation from what another worker has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import chain

import torch
from torch import Tensor

from gossamer import events
from gossamer.algorithms.gossip.state_transfer import ReceivedState, rejoin
from gossamer.algorithms.topologies import Topology
from gossamer.base.layout import FlatTensors, accumulation_dtype
from gossamer.base.ops import Payload
from gossamer.comm.environment.worker_registry import has_ended
from gossamer.comm.packing import join, split
from gossamer.comm.runtime.peer_thread import PeerEndpoint, run_peer_script
from gossamer.errors import PeerLost, Stopped
from gossamer.train.engine.loop import LoopState
from gossamer.train.engine.parameter_views import copy_parameters


@torch.no_grad()
def take_over_state(
    me: PeerEndpoint,
    others: Sequence[int],
    parameters: Mapping[str, Tensor],
    loop: LoopState,
    leave: Callable[[], object],
) -> ReceivedState:
    """Overwrite parameters and statistics with those of the first of `others` that is here: what this worker had is
    lost. Raises Stopped where all have come to the end, after `leave`, and PeerLost where no other is left."""
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
    """All other workers, neighbors before the rest."""
    near = [peer for peer in topology.peers(rank, world) if peer != rank]
    return [*near, *(peer for peer in range(world) if peer not in (*near, rank))]


def _too_late(me: PeerEndpoint, leave: Callable[[], object]) -> Stopped:
    leave()
    number = me.me.number
    events.notice(f"worker {number} came back when the others had come to the end: nothing is left to be done")
    return Stopped()


def pack_parameters(parameters: Mapping[str, Tensor]) -> FlatTensors:
    """All side by side, on the CPU: (n,), in the widest dtype that any of them has."""
    dtype = reduce(torch.promote_types, (each.dtype for each in parameters.values()))
    return FlatTensors.pack({name: each.to("cpu", dtype) for name, each in parameters.items()})


def pack_statistics(loop: LoopState) -> Payload:
    """A copy of all the model's buffers, as bytes: one tensor, (m,) of uint8, or none. Some may be a step ahead."""
    held = tuple(each.detach().to("cpu", copy=True) for each in chain.from_iterable(loop.buffers()))
    return (join(held),) if held else ()


def unpack_statistics(loop: LoopState, taken: Payload) -> None:
    """Overwrite the buffers with what `pack_statistics` gave elsewhere."""
    held = tuple(chain.from_iterable(loop.buffers()))
    for joint in taken:
        for mine, theirs in zip(held, split(joint, held), strict=True):
            mine.copy_(theirs)
