"""Job: a run's script, processes and machines, its servers or elasticity, and its workers' environment."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from gossamer.base import system
from gossamer.base.host_port import LOOPBACK
from gossamer.base.run_files import NETWORK_NAMESPACE, RUN_DIRECTORY
from gossamer.errors import RecipeError, require

STANDBY = "--standby"  # first argument of a worker that waits for its environment
MOST_WORKERS = 2**16
SEALED = (
    "connections between workers are encrypted, and do not use NCCL. On a network of your own, without --relay, "
    "--private-network 10.0.0.0/8 with its address turns this off"
)

# Variables of one worker, which a launcher inherits if a worker of another run starts it
OF_A_WORKER = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"),
    *("GOSSAMER_COORDINATOR", "GOSSAMER_ELASTIC", "GOSSAMER_MEMBER", "GOSSAMER_PLACE", "GOSSAMER_RELAY"),
    *("GOSSAMER_SERVER", "GOSSAMER_JOURNAL", "GOSSAMER_DATA_ORDER", "GOSSAMER_REGISTRY", "GOSSAMER_REJOIN"),
)
# Variables that a launcher without an enclosing run has from a user, or from `gossamer compare`
OF_A_RUN = ("GOSSAMER_SERVERS", "GOSSAMER_UNTIL", "GOSSAMER_SECONDS", "GOSSAMER_AS_HOROVOD")

Spawn = Callable[[Sequence[str], Mapping[str, str], Path, Path], system.Process]


@runtime_checkable
class WarmSpawn(Protocol):
    """A Spawn that can make processes which are ready at once, so that no process needs to stand by."""

    def __call__(
        self, command: Sequence[str], environment: Mapping[str, str], output: Path, boot: Path
    ) -> system.Process: ...

    def warm_up(self, command: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Prepare for processes with this command and environment, at the first call. Return whether that is possible.
        The answer may change later."""


def inherited(given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment that a launcher extends for its workers: `given`, without variables of an enclosing run."""
    left_out = (*OF_A_WORKER, *(OF_A_RUN if RUN_DIRECTORY in given else ()))
    return {name: value for name, value in given.items() if name not in left_out}


def spawn(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: Path,
    boot: Path,
    given: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process as the leader of a new process group. output, boot: files for stdout and stderr; given: stdin."""
    with output.open("wb", buffering=0) as out, boot.open("wb", buffering=0) as errors:
        return system.start_group(command, environment, stdin=given, stdout=out, stderr=errors)


@dataclass(frozen=True, kw_only=True)
class Job:
    """`workers` processes on each of `nodes` machines run `script`; this is machine `node_rank` of them."""

    script: Path  # a file, or the dotted name of a module
    as_module: bool = False
    arguments: tuple[str, ...] = ()  # the script's
    name: str = ""  # shown for the program; empty for the script and its arguments
    workers: int = 2  # on this machine
    nodes: int = 1
    node_rank: int = 0
    rendezvous: str | None = None  # HOST:PORT where the machines meet; None for one machine
    token_file: Path | None = None  # file of the run's secret; None for a new secret, on one machine only
    interface: str | None = None  # the network interface to use; None for the default
    recipe: str | None = None  # the command line's
    max_restarts: int = 0
    grace_seconds: float = 30.0  # for workers to save, once the launcher was asked to stop
    logs: Path  # directory with one log file per rank
    worker_module: str = "gossamer.launcher.worker"  # `python -m` runs it
    keeps_standby: bool = False  # prepare for the next lost worker; `worker_module` accepts --standby
    begin: Spawn = spawn  # starts a worker
    hosts: tuple[Path, ...] = ()  # network namespaces of workers, then of servers; empty for this process's own
    settings: Mapping[str, str] = field(default_factory=dict)  # added to the workers' environment
    seals: bool = False  # workers of several machines encrypt without certificates, also if only one machine asks

    def __post_init__(self) -> None:
        require(self.workers >= 1, f"workers must be at least 1, got {self.workers}")
        require(
            self.nodes == 1 or self.rendezvous is not None,
            "several machines need a rendezvous: rendezvous='HOST:PORT'",
        )
        require(0 <= self.node_rank < self.nodes, f"node_rank must be in 0..{self.nodes - 1}, got {self.node_rank}")

    @property
    def local_ranks(self) -> range:
        """Global ranks of this machine's workers."""
        return range(self.node_rank * self.workers, (self.node_rank + 1) * self.workers)

    @property
    def outlives_losses(self) -> bool:
        """Whether the other workers continue without a lost worker and readmit it, as with pairwise gossip.

        Only the recipe of the command line is known here. Workers on an emulated network have no rendezvous store.
        """
        if self.recipe is None or self.workers == 1 or self.rendezvous is not None or self.hosts:
            return False
        from gossamer.algorithms.recipes.recipe import resolve  # imported late: it imports torch
        from gossamer.algorithms.strategies import GossipStage

        try:
            stages = resolve(self.recipe).strategy.stages
        except RecipeError:  # the workers report the error
            return False
        return all(isinstance(stage, GossipStage) and not stage.in_lock_step for stage in stages)

    @property
    def command(self) -> str:
        return self.name or shlex.join(self._program)

    @property
    def worker_arguments(self) -> tuple[str, ...]:
        """Unbuffered (-u), so that all printed output is in the file however the process ends."""
        return ("-u", "-m", self.worker_module, *self._program)

    @property
    def standby_command(self) -> tuple[str, ...]:
        """Command of a process that waits for the place of a lost worker; empty without restarts of single workers."""
        if not self.keeps_standby or not self.max_restarts:
            return ()
        return (sys.executable, "-u", "-m", self.worker_module, STANDBY, *self._program)

    @property
    def _program(self) -> tuple[str, ...]:
        return (*(("-m",) if self.as_module else ()), str(self.script), *self.arguments)

    def host(self, number: int) -> dict[str, str]:
        """Variables of the process on the emulated host of this number; empty without an emulated network."""
        return {NETWORK_NAMESPACE: str(self.hosts[number])} if self.hosts else {}

    def environment(self, directory: Path, given: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Variables to add to the environment of every worker. given: the environment to extend."""
        added = {
            RUN_DIRECTORY: str(directory),
            "GOSSAMER_LAUNCHER_PID": str(os.getpid()),
            "GOSSAMER_GRACE_SECONDS": str(self.grace_seconds),
        }
        if self.recipe is not None:
            added["GOSSAMER_RECIPE"] = self.recipe
        if self.interface is not None:
            added |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), self.interface)
        elif self.rendezvous is None and "GLOO_SOCKET_IFNAME" not in given and system.LOOPBACK_INTERFACE:
            added["GLOO_SOCKET_IFNAME"] = system.LOOPBACK_INTERFACE
        if "OMP_NUM_THREADS" not in given:
            # N workers with a thread per core each are slower than one worker
            added["OMP_NUM_THREADS"] = threads_per_worker(self.workers)
        return added | dict(self.settings)


def threads_per_worker(workers: int) -> str:
    """OMP_NUM_THREADS of each of `workers` processes of this machine, unless the user has set it."""
    return str(max(1, system.cores() // workers))


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


SERVER = (sys.executable, "-u", "-m", "gossamer.train.parameter_server")


@dataclass(frozen=True, kw_only=True)
class Serving:
    """`servers` processes that hold the parameters, in addition to a job's workers.

    On an emulated network, the hosts of servers follow those of the workers.
    """

    servers: int
    command: tuple[str, ...] = SERVER  # command of a server
    standby: tuple[str, ...] = (*SERVER, "--spare")  # command of a standby process; empty for no standby
    endpoints: tuple[str, ...] = ()  # HOST:PORT of each server; empty for free ports on the job's interface or loopback
    store_endpoint: str | None = None  # HOST:PORT where the launcher serves the store
    network: Path | None = None  # the file of the store's network namespace; None for the launcher's own

    def __post_init__(self) -> None:
        require(self.servers >= 0, f"servers must be at least 0, got {self.servers}")
        require(
            len(self.endpoints) in (0, self.servers),
            f"{self.servers} servers need {self.servers} endpoints or an empty tuple, got {len(self.endpoints)}",
        )


NO_SERVERS = Serving(servers=0)


@dataclass(frozen=True, kw_only=True)
class WorkerRange:
    """Number of workers of an elastic run.

    Args:
        least: with fewer workers, training waits for more.
        most: further workers wait until another one leaves.
        initial: number of workers to start at first.

    Raises:
        ValueError: unless 1 <= least <= initial <= most.
    """

    least: int
    most: int
    initial: int

    def __post_init__(self) -> None:
        require(self.least >= 1, f"an elastic run needs at least 1 worker, got {self.least}")
        require(self.most <= MOST_WORKERS, f"a run has at most {MOST_WORKERS} workers, got {self.most}")
        require(
            self.least <= self.most,
            f"a minimum of {self.least} workers is more than the maximum of {self.most}: write "
            f"{self.most}:{self.least}",
        )
        require(
            self.least <= self.initial <= self.most,
            f"a run of {self.least} to {self.most} workers cannot begin with {self.initial}: write "
            f"{self.least}:{self.most}:{min(max(self.initial, self.least), self.most)}",
        )

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


def read_worker_range(text: str) -> WorkerRange:
    """Parse MIN:MAX or MIN:MAX:FIRST. Without FIRST, the run begins with MAX workers. Raises ValueError."""
    numbers = text.split(":")
    if not 2 <= len(numbers) <= 3 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise ValueError(f"{text!r} is not a range of workers. Write MIN:MAX, such as 2:8, or MIN:MAX:FIRST")
    least, most, *first = (int(number[:9]) for number in numbers)
    return WorkerRange(least=least, most=most, initial=first[0] if first else most)


@dataclass(frozen=True, kw_only=True)
class InvitationOptions:
    """The first link of a run.

    Args:
        file: where to write it; None for the folder of logs, if other machines can reach the run.
        lifetime_seconds: how long it is valid; None for the whole run.
        uses: maximum number of machines that may use it; None for no limit.
        addresses: further addresses of the coordinator, such as that of a forwarded port.
    """

    file: Path | None = None
    lifetime_seconds: float | None = 86400.0
    uses: int | None = None
    addresses: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Elasticity:
    """Elasticity of a run as seen by one of its launchers. Job.workers is the number of workers that it starts with.

    Args:
        range: least, most and initial number of workers.
        listen: address of this launcher's coordinator or relay; port 0 for any free one. None if it has neither.
        coordinator: address of another launcher's coordinator, whose run this launcher joins.
        network: file of the network namespace to listen in; None for this process's own.
        invitation: the link that this launcher makes.
        relays: whether this launcher forwards traffic of workers that cannot connect to each other, at `listen`.
        servers: HOST:PORT of this launcher's parameter servers; empty for a run in lock step.
        seals: whether connections between workers are sealed with keys that each pair agrees on.
    """

    range: WorkerRange
    listen: tuple[str, int] | None = (LOOPBACK, 0)
    coordinator: tuple[str, int] | None = None
    network: Path | None = None
    invitation: InvitationOptions = InvitationOptions()
    relays: bool = False
    servers: tuple[str, ...] = ()
    seals: bool = False

    def __post_init__(self) -> None:
        serves = self.coordinator is None or self.relays
        require((self.listen is not None) is serves, "pass listen for a coordinator or a relay, and only for them")
