"""Job: describes a run's script, processes and machines, its servers or elasticity, and its workers' environment."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gossamer.base.run_files import RUN_DIRECTORY
from gossamer.errors import RecipeError, require

LOOPBACK = "127.0.0.1"
MOST_WORKERS = 2**16


@dataclass(frozen=True, kw_only=True)
class Job:
    """`workers` processes on each of `nodes` machines run `script`; this is machine `node_rank` of them."""

    script: Path  # a file, or the dotted name of a module
    as_module: bool = False
    arguments: tuple[str, ...] = ()  # the script's
    workers: int = 2  # on this machine
    nodes: int = 1
    node_rank: int = 0
    rendezvous: str | None = None  # HOST:PORT where the machines meet; None for one machine
    token_file: Path | None = None  # the run's secret; None for a new one, which several machines do not share
    interface: str | None = None  # the network interface to use; None for the default
    recipe: str | None = None  # the command line's
    max_restarts: int = 0
    grace_seconds: float = 30.0  # for workers to save, once the launcher was asked to stop
    logs: Path  # a directory for one log file a rank
    worker_module: str = "gossamer.launch.worker"  # `python -m` runs it
    prefix: tuple[str, ...] = ()  # before every worker's command, with ${local_rank} for its number here
    settings: Mapping[str, str] = field(default_factory=dict)  # added to the workers' environment

    def __post_init__(self) -> None:
        require(self.workers >= 1, f"workers is a count of at least 1, not {self.workers}")
        require(
            self.nodes == 1 or self.rendezvous is not None,
            "several machines need a place to meet: rendezvous",
        )
        require(0 <= self.node_rank < self.nodes, f"node_rank is in 0..{self.nodes - 1}, not {self.node_rank}")

    @property
    def local_ranks(self) -> range:
        """The ranks that this machine's workers have in the whole job."""
        return range(self.node_rank * self.workers, (self.node_rank + 1) * self.workers)

    @property
    def outlives_losses(self) -> bool:
        """Whether the others go on without a lost worker and take it back, as with pairwise gossip.

        Only the command line's recipe is known here, and a lab's workers have no store to rendezvous at.
        """
        if self.recipe is None or self.workers == 1 or self.rendezvous is not None or self.prefix:
            return False
        from gossamer.algorithms.recipes.recipe import resolve  # imports torch, which a command's help does without
        from gossamer.algorithms.strategies import GossipStage

        try:
            stages = resolve(self.recipe).strategy.stages
        except RecipeError:  # the workers say what is wrong with it
            return False
        return all(isinstance(stage, GossipStage) and not stage.in_lock_step for stage in stages)

    @property
    def command(self) -> str:
        return shlex.join(self._program)

    @property
    def worker_arguments(self) -> tuple[str, ...]:
        """Unbuffered, so that what was printed is in the file whatever ends the process."""
        return ("-u", "-m", self.worker_module, *self._program)

    @property
    def _program(self) -> tuple[str, ...]:
        return (*(("-m",) if self.as_module else ()), str(self.script), *self.arguments)

    def environment(self, directory: Path, given: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Variables to add to the `given` environment for every worker."""
        added = {
            RUN_DIRECTORY: str(directory),
            "GOSSAMER_LAUNCHER_PID": str(os.getpid()),
            "GOSSAMER_GRACE_SECONDS": str(self.grace_seconds),
        }
        if self.recipe is not None:
            added["GOSSAMER_RECIPE"] = self.recipe
        if self.interface is not None:
            added |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), self.interface)
        elif self.rendezvous is None and "GLOO_SOCKET_IFNAME" not in given:
            added["GLOO_SOCKET_IFNAME"] = loopback()
        if "OMP_NUM_THREADS" not in given:
            # N workers that each take every core are slower than one worker
            added["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // self.workers))
        return added | dict(self.settings)


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def loopback() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"


SERVER = (sys.executable, "-u", "-m", "gossamer.train.parameter_server")


@dataclass(frozen=True, kw_only=True)
class Serving:
    """`servers` processes that hold the parameters, beside a job's workers.

    With a prefix in the job, server k runs where ${local_rank} is workers + k.
    """

    servers: int
    command: tuple[str, ...] = SERVER  # what a server runs
    standby: tuple[str, ...] = (*SERVER, "--spare")  # what a standby process runs; empty for none
    endpoints: tuple[str, ...] = ()  # HOST:PORT of each server; empty for free ports on the job's interface or loopback
    store_endpoint: str | None = None  # HOST:PORT where the launcher serves the store
    network: Path | None = None  # the file of the store's network namespace; None for the launcher's own

    def __post_init__(self) -> None:
        require(self.servers >= 0, f"servers is a count of at least 0, not {self.servers}")
        require(
            len(self.endpoints) in (0, self.servers),
            f"{self.servers} servers need {self.servers} endpoints or none, not {len(self.endpoints)}",
        )


NO_SERVERS = Serving(servers=0)


@dataclass(frozen=True, kw_only=True)
class WorkerRange:
    """least: below, those that are left wait for others; most: beyond, whoever comes waits; initial: started at first.

    Raises ValueError unless 1 <= least <= initial <= most.
    """

    least: int
    most: int
    initial: int

    def __post_init__(self) -> None:
        require(self.least >= 1, f"an elastic run needs at least 1 worker to go on, not {self.least}")
        require(self.most <= MOST_WORKERS, f"{self.most} workers are more than any run's: at most {MOST_WORKERS}")
        require(
            self.least <= self.most,
            f"at least {self.least} and at most {self.most} workers leave no number between: write "
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
    """What MIN:MAX or MIN:MAX:FIRST means; a run begins with MAX where FIRST is left out. Raises ValueError."""
    numbers = text.split(":")
    if not 2 <= len(numbers) <= 3 or not all(number.isascii() and number.isdigit() for number in numbers):
        raise ValueError(f"{text!r} is no range of workers. Write MIN:MAX, such as 2:8, or MIN:MAX:FIRST")
    least, most, *first = (int(number[:9]) for number in numbers)
    return WorkerRange(least=least, most=most, initial=first[0] if first else most)


@dataclass(frozen=True, kw_only=True)
class Elasticity:
    """An elastic run as one of its launchers sees it, beside a Job, whose `workers` are those that it begins with.

    listen: where this launcher's coordinator listens, port 0 for any free one; coordinator: where another launcher's
    does, to be joined. One of the two. network: the file of the network namespace to listen in, None for this process's
    own.
    """

    range: WorkerRange
    listen: tuple[str, int] | None = (LOOPBACK, 0)
    coordinator: tuple[str, int] | None = None
    network: Path | None = None

    def __post_init__(self) -> None:
        require((self.listen is None) != (self.coordinator is None), "a launcher has a coordinator, or joins one")
