"""Dedicated servers of a run: their options, and the hosts they run on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import click

from gossamer.cli.emulation import PORT, Emulation
from gossamer.cli.options import Machines
from gossamer.launch.failure import Outcome
from gossamer.launch.fixed_run import launch
from gossamer.launch.job import Job, Serving
from gossamer.launch.rendezvous import Met, nobody_asks
from gossamer.launch.served_run import launch_peers
from gossamer.plan.emulation.namespaces import DIRECTORY

Start = Callable[..., Outcome]
ONE_MACHINE = (
    "--servers starts servers and workers on one machine, and {option} is for several. Leave out {option}; or leave "
    "out --servers, so that every worker holds a part of the parameters: gossamer run --nnodes N --rendezvous "
    "HOST:PORT SCRIPT"
)


def read_serving(servers: int, machines: Machines) -> Serving | None:
    """The dedicated servers of a run, if it has any."""
    if servers == 0:
        return None
    for option, given in (("--nnodes", machines.nodes > 1), ("--rendezvous", machines.rendezvous is not None)):
        if given:
            raise click.UsageError(ONE_MACHINE.format(option=option))
    return Serving(servers=servers)


def starter(job: Job, serving: Serving | None, emulation: Emulation, met: Met = nobody_asks) -> Start:
    """The launcher of this job, on the emulation's hosts. Takes the remaining arguments of `launch`."""
    if serving is None:
        return partial(launch, emulation.place(job), met=met)
    return partial(launch_peers, emulation.place(job), place_servers(job, serving, emulation))


def place_servers(job: Job, serving: Serving, emulation: Emulation) -> Serving:
    """The same servers on the lab's hosts after the workers'. The first host has the store, too.

    So the loss of a worker's host is the loss of a worker and no more.
    """
    if emulation.testbed is None:
        return serving
    hosts = emulation.testbed.hosts[job.workers :]
    return replace(
        serving,
        endpoints=tuple(f"{host.address}:{PORT + 1}" for host in hosts),
        store_endpoint=f"{hosts[0].address}:{PORT}",
        network=DIRECTORY / hosts[0].namespace,
    )
