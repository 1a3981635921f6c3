"""Emulated runs: assign a run's workers to emulated hosts, inject faults, and complete the record."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gossamer.base import system
from gossamer.base.run_files import RunFiles
from gossamer.comm.environment.run_settings import HEADER_BYTES
from gossamer.comm.network import Network
from gossamer.launcher.job import Job
from gossamer.observe.record import NO_NETWORK, Record
from gossamer.plan.emulation import EmulatedNetwork, EmulationPlan, Fault, Schedule, plan
from gossamer.plan.emulation.capabilities import reentering
from gossamer.plan.emulation.namespaces import EmulationError

PACED = "GOSSAMER_PACED"
REENTERED = "GOSSAMER_LAB_REENTERED"
PORT = 29500  # every port is free on an emulated host
# torch warns of every peer address without a name; emulated hosts have none
LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
QUIET = os.environ.get(LOG_LEVEL, "ERROR")
APPROXIMATE = (
    "{network} is only approximated on this machine: {reason}. Each operation of Gossamer is delayed by its time on "
    'the network; connections, queues and other traffic are not. The record has "emulation": "paced".'
)

NO_HOSTS = (
    "the faults cut and slow affect hosts of an emulated network, and this run has none. Add --network 100mbit. With "
    "a paced network there are no hosts either."
)


@dataclass
class Emulation:
    """The network of one run. testbed: None without a network, or if operations are only delayed (paced)."""

    network: Network | None = None
    name: str | None = None
    testbed: EmulatedNetwork | None = None
    began: float | None = None  # start of training, time.monotonic()
    cpu_seconds_before: float | None = None

    def place(self, job: Job) -> Job:
        """The job on the emulated hosts. The rendezvous is at the host of rank 0."""
        if self.testbed is None:
            paced = {PACED: self.network.text} if self.network is not None else {}
            return replace(job, settings={**job.settings, **paced})
        settings = {
            "MASTER_ADDR": self.testbed.hosts[0].address,
            "MASTER_PORT": str(PORT),
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # the launcher's store is outside the emulated network
            LOG_LEVEL: QUIET,
            HEADER_BYTES: str(self.testbed.header_bytes),
        }
        prefix = self.testbed.prefix("${local_rank}")
        return replace(
            job, interface=self.testbed.hosts[0].interface, prefix=prefix, settings={**job.settings, **settings}
        )

    def training_seconds(self, has_begun: bool) -> float | None:
        """Seconds since the first worker attached; None before."""
        if self.began is None and has_begun:
            self.began = time.monotonic()
            self.cpu_seconds_before = self.testbed.cpu_seconds() if self.testbed is not None else None
        return None if self.began is None else time.monotonic() - self.began

    def record(self) -> Record:
        """Fields of the record about the network, at the end of the run."""
        if self.network is None:
            return NO_NETWORK
        described = {"network": self.network.text, "emulation": self.name}
        return described if self.testbed is None else described | {"lab": self._testbed_record(self.testbed)}

    def _testbed_record(self, testbed: EmulatedNetwork) -> Record:
        """cpu_share: share of one core that the switch used while training; None if the kernel forwards packets."""
        spent, seconds = testbed.cpu_seconds(), self.training_seconds(False)
        share = None
        if spent is not None and self.cpu_seconds_before is not None and seconds:
            share = round((spent - self.cpu_seconds_before) / seconds, 4)
        return {"mtu": testbed.mtu, "cpu_share": share}


def enter(network: Network | None, faults: Sequence[Fault]) -> EmulationPlan | None:
    """Plan the emulation of `network`. If it needs a user namespace, this process restarts itself inside one."""
    planned = plan(network) if network is not None else None
    if any(fault.needs_network for fault in faults) and (planned is None or planned.emulation == "paced"):
        raise EmulationError(NO_HOSTS)
    if planned is None or not planned.reenters:
        return planned
    if REENTERED in os.environ:
        raise EmulationError(
            "this process cannot create network namespaces, even in its own user namespace. Run as root."
        )
    os.environ |= {REENTERED: "1", LOG_LEVEL: QUIET}
    command = reentering([sys.executable, "-m", "gossamer", *sys.argv[1:]])
    os.execvp(command[0], command)


@contextmanager
def emulate(network: Network | None, planned: EmulationPlan | None, note: Callable[[str], None]) -> Iterator[Emulation]:
    if network is None or planned is None:
        yield Emulation()
    elif planned.emulation == "paced":
        note(APPROXIMATE.format(network=network.text, reason=planned.reason))
        yield Emulation(network=network, name="paced")
    else:
        with EmulatedNetwork(network) as testbed:
            yield Emulation(network=network, name=testbed.emulation, testbed=testbed)


class RunFaultTarget:
    """Applies faults to the emulated hosts and the workers of a run."""

    def __init__(self, testbed: EmulatedNetwork | None, directory: Path) -> None:
        self._testbed = testbed
        self._files = RunFiles(directory)

    @property
    def testbed(self) -> EmulatedNetwork:
        if self._testbed is None:
            raise EmulationError(NO_HOSTS)
        return self._testbed

    def cut(self, host: int, other: int | None) -> None:
        self.testbed.cut(host, other)

    def heal(self, host: int, other: int | None) -> None:
        self.testbed.heal(host, other)

    def slow(self, host: int, factor: float) -> None:
        self.testbed.slow(host, factor)

    def stop(self, rank: int) -> None:
        self._to_worker(rank, system.pause_group)

    def resume(self, rank: int) -> None:
        self._to_worker(rank, system.resume_group)

    def kill(self, rank: int) -> None:
        self._to_worker(rank, system.kill_group)

    def _to_worker(self, rank: int, action: Callable[[int], None]) -> None:
        """Apply an action to a worker and its helpers, if it was started."""
        started = self._files.newest_start(rank)
        if started is not None:
            action(started["pid"])


def schedule(faults: Sequence[Fault], emulation: Emulation, directory: Path, note: Callable[[str], None]) -> Schedule:
    """The schedule of the faults of this run."""
    return Schedule(faults, RunFaultTarget(emulation.testbed, directory), note)
