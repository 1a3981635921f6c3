"""Dry run: prints the processes of `gossamer run` without starting them."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from gossamer.algorithms.recipes.recipe import automatic, resolve
from gossamer.base.units import ranks_text
from gossamer.cli.console import echo
from gossamer.comm.network import Network
from gossamer.launcher.job import Elasticity, Job, Serving

PRIVATE = ".run-*"  # private folder of the run, removed at its end
OWN_RECIPE = "the script's own, or EveryStep() + Dense() + Complete()"


def show_plan(
    job: Job,
    serving: Serving | None,
    elasticity: Elasticity | None,
    network: Network | None,
    faults: Sequence[str],
    files: Sequence[Path],
) -> None:
    """Print the run's command, processes, hosts, recipe, environment and files.

    Args:
        job: the run.
        serving: its dedicated servers, if any.
        elasticity: of an elastic run, else None.
        network: the network to emulate, if any.
        faults: the texts of --fault.
        files: further files that the run writes.
    """
    for name, value in _plan(job, serving, elasticity, network, faults, files):
        echo(f"{name:<13}{value}")
    echo("Nothing was started.")


def _plan(
    job: Job,
    serving: Serving | None,
    elasticity: Elasticity | None,
    network: Network | None,
    faults: Sequence[str],
    files: Sequence[Path],
) -> Iterator[tuple[str, str]]:
    yield "command", shlex.join([sys.executable, *job.worker_arguments])
    if elasticity is None:
        yield "workers", f"{job.workers} on this machine, {ranks_text(job.local_ranks)} of {job.workers * job.nodes}"
    else:
        yield "workers", f"{job.workers} on this machine at first, {elasticity.range} in the elastic run"
    if serving is not None:
        yield "servers", f"{serving.servers}: {shlex.join(serving.command)}"
    yield "restarts", f"at most {job.max_restarts}"
    yield "recipe", _recipe(job, None if elasticity is not None else job.workers * job.nodes)
    yield "hosts", _hosts(job, elasticity)
    if job.seals or (elasticity is not None and elasticity.seals):
        yield "encryption", "of all connections between workers"
    if network is not None:
        yield "network", f"{network.text}, emulated: each worker and server has its own host"
    yield from (("fault", text) for text in faults)
    environment = job.environment(job.logs / PRIVATE) | {"GOSSAMER_LAUNCHER_PID": "PID"}
    yield from (("environment", f"{name}={shlex.quote(value)}") for name, value in sorted(environment.items()))
    yield "", "in addition, for each process: its rank, and the rendezvous address"
    servers = 0 if serving is None else serving.servers
    logs = [*(f"rank-{rank}.log" for rank in job.local_ranks), *(f"server-{server}.log" for server in range(servers))]
    yield "files", f"{job.logs}: {', '.join(logs)}, record.json, run.sqlite"
    yield from (("", str(path)) for path in files)


def _recipe(job: Job, workers: int | None) -> str:
    """The recipe as written, and with all of its terms."""
    if job.recipe is None:
        return OWN_RECIPE
    if automatic(job.recipe) is not None:
        return f"{job.recipe}: chosen while training"
    resolved = repr(resolve(job.recipe, workers))
    return job.recipe if resolved == job.recipe else f"{job.recipe}, which is {resolved}"


def _hosts(job: Job, elasticity: Elasticity | None) -> str:
    here = socket.gethostname()
    if elasticity is not None and elasticity.coordinator is not None:
        return "{}, joins the coordinator at {}:{}".format(here, *elasticity.coordinator)
    if elasticity is not None and elasticity.listen is not None:
        host, port = elasticity.listen
        return f"{here}, with the coordinator at {host}, port {port or 'chosen at the start'}"
    if job.rendezvous is None:
        return f"{here} alone"
    return f"{here}, machine {job.node_rank} of {job.nodes}, rendezvous at {job.rendezvous}"
