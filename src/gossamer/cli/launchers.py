"""Launchers of a run: with a fixed number of workers, with servers, or elastic; and the checks of their options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from gossamer.base.host_port import LOOPBACK
from gossamer.cli.emulation import PORT, Emulation
from gossamer.cli.options import ElasticOptions, Machines
from gossamer.comm.environment import interfaces
from gossamer.launcher.failure import Outcome
from gossamer.launcher.fixed_run import launch
from gossamer.launcher.job import (
    MOST_WORKERS,
    NO_SERVERS,
    Elasticity,
    InvitationOptions,
    Job,
    Serving,
    WorkerRange,
)
from gossamer.launcher.rendezvous import Met, ignore_peer
from gossamer.launcher.served_run import launch_peers
from gossamer.observe.live import LiveView
from gossamer.observe.telemetry import MachineDesk
from gossamer.plan.emulation import EmulationPlan
from gossamer.plan.emulation.capabilities import NO_RELAYS
from gossamer.plan.emulation.namespaces import DIRECTORY

Start = Callable[..., Outcome]
LINK_OPTIONS = {
    "--invite": "file",
    "--invite-lifetime": "lifetime_seconds",
    "--invite-uses": "uses",
    "--public-address": "addresses",
}  # fields of InvitationOptions
ONE_MACHINE = (
    "--servers starts servers and workers on one machine, and {option} is for several machines. Leave out {option}; or "
    "leave out --servers, so that the parameters are sharded over the workers: gossamer run --nnodes N --rendezvous "
    "HOST:PORT SCRIPT"
)


def read_serving(servers: int, machines: Machines) -> Serving | None:
    """The dedicated servers of a run; None for a run without."""
    if servers == 0:
        return None
    for option, given in (("--nnodes", machines.nodes > 1), ("--rendezvous", machines.rendezvous is not None)):
        if given:
            raise click.UsageError(ONE_MACHINE.format(option=option))
    return Serving(servers=servers)


def starter(job: Job, serving: Serving | None, emulation: Emulation, met: Met = ignore_peer) -> Start:
    """The launcher of this job, on the emulated hosts. It takes the remaining arguments of `launch`."""
    if serving is None:
        return partial(launch, emulation.place(job), met=met)
    return partial(launch_peers, emulation.place(job), place_servers(job.workers, serving, emulation))


def place_servers(workers: int, serving: Serving, emulation: Emulation) -> Serving:
    """The servers on the emulated hosts after those of the workers. The store is on the first server's host.

    So the loss of a worker's host loses that worker only.
    """
    if emulation.testbed is None or not serving.servers:
        return serving
    hosts = emulation.testbed.hosts[workers:]
    return replace(
        serving,
        endpoints=tuple(f"{host.address}:{PORT + 1}" for host in hosts),
        store_endpoint=f"{hosts[0].address}:{PORT}",
        network=DIRECTORY / hosts[0].namespace,
    )


NO_TOKEN = (
    "--join needs the run's token, by which workers authenticate: copy the file that the first launcher names "
    "(mode 0600), and add --token-file FILE."
)
JOINED_RANGE = (
    "the run that these workers join has a range already: write the number of workers to start here, such as "
    "--workers {initial}; `gossamer resize` changes the range."
)
NO_MEETING = (
    "{option} is for a fixed number of machines. In an elastic run machines join and leave: start the first with "
    "--workers {workers} --listen HOST:PORT, and the others with --join HOST:PORT."
)
RELAY_SEALS = (
    "--relay and --tls exclude each other: with --relay, workers seal their connections without certificates. Leave "
    "out one of the two."
)
SERVERS_ELSEWHERE = (
    "the run's first launcher starts its servers, and the coordinator gives their addresses to all workers: write "
    "--servers there, and leave it out here."
)
SERVERS_RELAY = (
    "with --servers, workers connect to the first launcher's machine only, so nothing needs a relay: leave out --relay."
)
SERVERS_OPEN = (
    "workers of other machines would exchange parameters with the servers unencrypted. Add --tls FOLDER, or, on a "
    "network of your own, --private-network 10.0.0.0/8 with its address, or --plaintext."
)
ONE_MACHINE_ONLY = (
    "{option} is for runs on several machines, and workers of one machine never encrypt: leave it out, or add "
    "--workers MIN:MAX, such as 2:8, or --nnodes N."
)
RELAY_LISTENS = (
    "a machine that joins needs --listen HOST:PORT for a relay only, at an address that all workers reach: write "
    "--relay and --listen, or leave out both."
)
EMULATED = "--network emulates all hosts on this machine, and other machines cannot reach them: leave out {option}."
UNRELAYED = "the network has relays, and the emulated workers behind them need the run's own: add --relay."
PACED = (
    "--network can only be approximated here ({reason}), which does not slow the messages between workers of an "
    "elastic run. Leave out --network, or run as root."
)


def read_elasticity(
    workers: int | WorkerRange,
    machines: Machines,
    elastic: ElasticOptions,
    *,
    tls: Path | None = None,
    token_file: Path | None = None,
    servers: int = 0,
    network_text: str | None = None,
) -> Elasticity | None:
    """Elasticity of the run; None for a fixed number of workers. Raises UsageError for contradicting options."""
    join, listen, relays = elastic.join, elastic.listen, elastic.relay
    invitation, encryption = elastic.invitation, elastic.encryption
    if join is None and isinstance(workers, int):
        if listen is not None:
            raise click.UsageError("--listen is for elastic runs: add --workers MIN:MAX, such as 2:8.")
        if relays:
            raise click.UsageError("--relay is for elastic runs: add --workers MIN:MAX, such as 2:8.")
        if encryption.option and machines.nodes == 1:
            raise click.UsageError(ONE_MACHINE_ONLY.format(option=encryption.option))
        for option, field in LINK_OPTIONS.items():
            if getattr(invitation, field) != getattr(InvitationOptions(), field):
                raise click.UsageError(f"{option} is for elastic runs: add --workers MIN:MAX, such as 2:8.")
        return None
    if servers and join is not None:
        raise click.UsageError(SERVERS_ELSEWHERE)
    if servers and relays:
        raise click.UsageError(SERVERS_RELAY)
    if network_text is not None and (join or listen):
        raise click.UsageError(EMULATED.format(option="--join" if join else "--listen"))
    for option, given in (("--nnodes", machines.nodes > 1), ("--rendezvous", machines.rendezvous is not None)):
        if given:
            count = workers if isinstance(workers, WorkerRange) else f"1:{max(workers * machines.nodes, 1)}:{workers}"
            raise click.UsageError(NO_MEETING.format(option=option, workers=count))
    if relays and tls is not None:
        raise click.UsageError(RELAY_SEALS)
    if join is None:
        assert isinstance(workers, WorkerRange)
        if relays and encryption.plaintext:
            raise click.UsageError("--relay forwards sealed bytes only: leave out --plaintext, or --relay.")
        address = listen or (_address(machines.interface), 0)
        hosts = (address[0], *(host for host, _ in invitation.addresses))
        seals = relays or (tls is None and encryption.is_needed(hosts))
        if servers and seals:
            raise click.UsageError(SERVERS_OPEN)
        return Elasticity(range=workers, listen=address, invitation=invitation, relays=relays, seals=seals)
    if relays is not (listen is not None):
        raise click.UsageError(RELAY_LISTENS)
    if encryption.option:
        raise click.UsageError(
            f"the run's first launcher decides about encryption: write {encryption.option} there, leave it out here."
        )
    if invitation.file is not None or (invitation.addresses and not relays):
        raise click.UsageError("links are made by the run's first launcher: write `gossamer invite RUN` there.")
    if isinstance(workers, WorkerRange):
        raise click.UsageError(JOINED_RANGE.format(initial=workers.initial))
    if token_file is None:
        raise click.UsageError(NO_TOKEN)
    return Elasticity(
        range=WorkerRange(least=1, most=MOST_WORKERS, initial=workers),
        listen=listen,
        coordinator=join,
        invitation=invitation,
        relays=relays,
    )


def elastic_starter(
    job: Job,
    elasticity: Elasticity,
    emulation: Emulation,
    live: LiveView,
    others: MachineDesk | None,
    show_secret: Callable[[str], None] = lambda text: None,
    serving: Serving = NO_SERVERS,
) -> Start:
    """The launcher of this job, on the emulated hosts, with its coordinator on the first one. It takes the remaining
    arguments of `launch`. The live view follows workers that join later, too.

    Args:
        others: serves other launchers.
        show_secret: shows the link of the run, which must not be recorded.
        serving: the run's parameter servers.
    """
    from gossamer.launcher.elastic_run import coordinate_run, launch_members  # imported late: most runs are not elastic

    if emulation.testbed is not None:
        first = emulation.testbed.hosts[0]
        elasticity = replace(elasticity, listen=(first.address, PORT), network=DIRECTORY / first.namespace)
    coordinate = partial(coordinate_run, more_handlers=None if others is None else others.answers)
    return partial(
        launch_members,
        emulation.place(job),
        elasticity,
        serving=place_servers(elasticity.range.most, serving, emulation),
        staffed=live.staff,
        coordinate=coordinate,
        show_secret=show_secret,
    )


def check_emulation(elasticity: Elasticity | None, planned: EmulationPlan | None) -> None:
    """Refuse an emulation that would not slow the workers. Raises UsageError."""
    if elasticity is not None and planned is not None and planned.emulation == "paced":
        raise click.UsageError(UNRELAYED if planned.reason == NO_RELAYS else PACED.format(reason=planned.reason))


def _address(interface: str | None) -> str:
    if interface is None:
        return LOOPBACK
    address = interfaces().get(interface)
    if address is None:
        raise click.UsageError(f"{interface} has no IPv4 address to listen at. Name another: --interface NAME")
    return address
