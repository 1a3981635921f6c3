"""Machine links: what passes between the stores of a run's machines, by how the machines come together."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial

from gossamer.comm.environment.run_settings import tls_contexts
from gossamer.comm.rpc.sockets import Tls
from gossamer.launch.job import Elasticity, Job
from gossamer.launch.rendezvous import Met, nobody_asks
from gossamer.observe.telemetry import FirstMachine, GlobalRanks, MachineDesk, OtherMachine, Uplink, to_coordinator

FAREWELL_SECONDS = 5.0  # all end together, and a machine that was lost says nothing more


@dataclass(frozen=True, kw_only=True)
class MachineLinks:
    """others: takes in what other machines tell; uplink: to the first machine; met: hears when all have met."""

    others: MachineDesk | None = None
    uplink: Uplink | None = None
    met: Met = nobody_asks


@contextmanager
def machine_links(job: Job, elasticity: Elasticity | None, note: Callable[[str], None]) -> Iterator[MachineLinks]:
    """The links of this launcher, while the block runs."""
    if elasticity is not None:
        yield MachineLinks(others=MachineDesk(), uplink=_to_elastic_run(job, elasticity))
    elif job.nodes == 1:
        yield MachineLinks()
    elif job.node_rank:
        way = OtherMachine(_token(job), _tls(job), note)
        yield MachineLinks(uplink=Uplink(way.line), met=way.met)
    else:
        desk = MachineDesk(numbering=GlobalRanks, patience_seconds=FAREWELL_SECONDS)
        with closing(FirstMachine(desk, _token(job), _tls(job), note)) as first:
            yield MachineLinks(others=desk, met=first.met)


def _to_elastic_run(job: Job, elasticity: Elasticity) -> Uplink | None:
    """For a launcher that joins another's run."""
    token = _token(job)
    if elasticity.coordinator is None or token is None:
        return None
    return Uplink(partial(to_coordinator, elasticity.coordinator, token, _tls(job)))


def _token(job: Job) -> bytes | None:
    return None if job.token_file is None else hashlib.sha256(job.token_file.read_bytes()).digest()


def _tls(job: Job) -> Tls | None:
    folder = job.settings.get("GOSSAMER_TLS")
    return Tls(*tls_contexts(folder)) if folder else None
