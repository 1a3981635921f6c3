"""Peer launcher: runs a job whose workers and servers are lost and restarted one by one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from gossamer.base.run_files import RunFiles
from gossamer.comm.environment import worker_registry
from gossamer.comm.environment.network_interfaces import interfaces
from gossamer.comm.environment.run_token import check_token_file, make_token_file
from gossamer.comm.runtime.signal_handlers import STOP_SIGNALS, handling
from gossamer.errors import ConnectError, require
from gossamer.launch.failure import LOOK_SECONDS, Outcome
from gossamer.launch.job import Job, Serving
from gossamer.launch.logs.follow import Show
from gossamer.launch.parent_watchdog import OrphanReaper
from gossamer.launch.periodic import PeriodicTask
from gossamer.launch.ports import free_endpoints
from gossamer.launch.rendezvous import serve_store
from gossamer.launch.stop_request import StopRequest
from gossamer.launch.supervisor import Supervisor

LOOPBACK = "127.0.0.1"
# Variables that an outer launcher, or a run that this one is part of, may have set
FOREIGN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"),
    *("GOSSAMER_SERVER", "GOSSAMER_JOURNAL", "GOSSAMER_REJOIN"),
)


def launch_peers(
    job: Job,
    serving: Serving,
    directory: Path,
    *,
    show: Show,
    note: Callable[[str], None],
    tick: Callable[[], None],
) -> Outcome:
    """Run `job` beside its servers, if any, until no worker is left; arguments as `launch` has them. Call in the main
    thread.

    A worker that a signal ends is lost: `note` says so and the others go on; job.max_restarts is how often each may be
    started again, alone, with GOSSAMER_REJOIN=1. A worker that ends with an error ends the run, and so does the loss of
    all, or, where no server has the parameters, of the last that has any. A server that ends is started again at the
    same address with the same journal, at most SERVER_RESTARTS times, by a standby process; PeerLost is raised where
    that does not help.
    """
    require(job.nodes == 1, "workers and servers that are lost one by one are started on one machine")
    stop = StopRequest()
    with handling(stop, *STOP_SIGNALS), OrphanReaper(directory) as orphan_reaper:
        store, store_endpoint = serve_store(serving.store_endpoint or f"{_host(job)}:0", serving.network)
        endpoints = serving.endpoints or free_endpoints(_host(job), serving.servers)
        token = check_token_file(job.token_file) if job.token_file else make_token_file(directory)
        shared_environment = _shared_environment(job, directory, store_endpoint, endpoints, token)
        trains, exited = partial(worker_registry.trains, store), partial(worker_registry.mark_exited, store)
        supervisor = Supervisor(
            job, serving, RunFiles(directory), orphan_reaper, shared_environment, trains, exited, show, note
        )

        def look() -> None:
            supervisor.look()
            tick()

        try:
            with PeriodicTask(LOOK_SECONDS, look):
                return supervisor.run(stop)
        finally:
            supervisor.close()
            del store, trains, exited  # no process is left to ask it


def _host(job: Job) -> str:
    if job.interface is None:
        return LOOPBACK
    address = interfaces().get(job.interface)
    if address is None:
        raise ConnectError(
            f"{job.interface} has no IPv4 address, so servers cannot listen there. Name another: --interface NAME"
        )
    return address


def _shared_environment(
    job: Job, directory: Path, store_endpoint: str, endpoints: Sequence[str], token: Path
) -> Mapping[str, str]:
    """The environment that all processes of this run share. Of the secret it holds the path only."""
    address, _, port = store_endpoint.rpartition(":")
    inherited = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return inherited | job.environment(directory) | {
        "WORLD_SIZE": str(job.workers),
        "LOCAL_WORLD_SIZE": str(job.workers),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GOSSAMER_RUN": secrets.token_hex(8),
        "GOSSAMER_REGISTRY": "1",
        "GOSSAMER_SERVERS": ",".join(endpoints),
        "GOSSAMER_TOKEN_FILE": str(token),
    }  # fmt: skip
