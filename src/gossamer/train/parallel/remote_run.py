"""Remote run: the hub of this worker, opened with the first remote module and closed at the script's end."""

from __future__ import annotations

import atexit
import os
import sys
import weakref

from gossamer.comm.elastic.joined_run import is_elastic
from gossamer.comm.environment.run_settings import LARGEST_FRAME_BYTES, returns
from gossamer.comm.process_group import ProcessGroupTransport
from gossamer.comm.runtime.worker_scope import WorkerScope, current_worker
from gossamer.errors import LoopError, PeerLost
from gossamer.events import WithoutSession, emit, notice
from gossamer.train import world_state
from gossamer.train.parallel.remote_hub import RemoteHub
from gossamer.train.synchronizers.peer_endpoints import SLACK_BYTES, connect_workers

_hubs: weakref.WeakKeyDictionary[WorkerScope, RemoteHub] = weakref.WeakKeyDictionary()


def current_hub() -> RemoteHub:
    """This worker's hub. The first call is collective. Raises LoopError."""
    worker = current_worker()
    if worker not in _hubs:
        _hubs[worker] = hub = _opened()
        emit(WithoutSession(trains=True))
        atexit.register(_end, hub, os.getpid())
    return _hubs[worker]


def _opened() -> RemoteHub:
    here = world_state.current()
    own = here.own_transport()
    if is_elastic() or returns() or (own is not None and here.size > 1):
        raise LoopError(
            "remote modules exist only as long as their owner, so they need a run with a fixed number of workers: not "
            "elastic, without workers that return alone, and not simulated. Start it by gossamer run --workers N "
            "SCRIPT."
        )
    transport = own or ProcessGroupTransport()
    try:
        endpoint = connect_workers(
            here.rank, LARGEST_FRAME_BYTES - SLACK_BYTES, transport.all_gather_text, asks_end_with_peer=True
        )
    finally:
        transport.close()
    return RemoteHub(endpoint, here.rank, here.size)


def _end(hub: RemoteHub, process: int) -> None:
    """Close the hub at the script's end; after a failure, or in a forked child, without waiting for other ranks."""
    if os.getpid() != process:
        return
    if getattr(sys, "last_value", None) is None:
        try:
            hub.end()
        except PeerLost as lost:
            notice(str(lost))
    hub.close()
