"""What is to be run, and the environment its workers find."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gossamer.errors import RecipeError, require
from gossamer.launch.logs.run_files import RUN_DIRECTORY
from gossamer.recipes.recipe import resolve
from gossamer.strategies import GossipStage


@dataclass(frozen=True, kw_only=True)
class Job:
    """`workers` processes on each of `nodes` machines run `script`; this is machine `node_rank` of them.

    rendezvous: HOST:PORT where the machines meet, None for one machine; interface: the network interface to
    use, None for the default; logs: a directory for one log file a rank; worker_module: `python -m` runs it;
    prefix: what comes before every worker's command, with ${local_rank} for its number here; settings: what is added to
    its environment.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    workers: int = 2
    nodes: int = 1
    node_rank: int = 0
    rendezvous: str | None = None
    interface: str | None = None
    recipe: str | None = None
    max_restarts: int = 0
    logs: Path
    worker_module: str = "gossamer.launch.worker"
    prefix: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

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
        """Whether workers that go on can do without one that is lost, and take it back: where each averages with single
        neighbours. Only what the command line says is known here, and a lab's workers have no store to meet at."""
        if self.recipe is None or self.workers == 1 or self.rendezvous is not None or self.prefix:
            return False
        try:
            stages = resolve(self.recipe).strategy.stages
        except RecipeError:  # the workers say what is wrong with it
            return False
        return all(isinstance(stage, GossipStage) and not stage.in_lock_step for stage in stages)

    @property
    def command(self) -> str:
        return shlex.join([str(self.script), *self.arguments])

    @property
    def worker_arguments(self) -> tuple[str, ...]:
        """Unbuffered, so that what was printed is in the file whatever ends the process."""
        return ("-u", "-m", self.worker_module, str(self.script), *self.arguments)

    def environment(self, directory: Path, given: Mapping[str, str] = os.environ) -> dict[str, str]:
        """What to add to the `given` environment for every worker."""
        added = {RUN_DIRECTORY: str(directory), "GOSSAMER_LAUNCHER_PID": str(os.getpid())}
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


SERVER = (sys.executable, "-u", "-m", "gossamer.parameter_server")


@dataclass(frozen=True, kw_only=True)
class Serving:
    """`servers` processes beside a job's workers, which hold the parameters; none where those need nobody else.

    token_file: the run's secret, None for a new one; command: what a server runs; spare: what a process runs that waits
    to take a lost server's place, nothing where none shall; endpoints: HOST:PORT of each server, none for free ports on
    the job's interface, which is loopback unless it names one; meeting: HOST:PORT where the launcher serves the store,
    in the namespace `network` (its file; None: the launcher's own). With a prefix in the job, server k runs where
    ${local_rank} is workers + k.
    """

    servers: int
    token_file: Path | None = None
    command: tuple[str, ...] = SERVER
    spare: tuple[str, ...] = (*SERVER, "--spare")
    endpoints: tuple[str, ...] = ()
    meeting: str | None = None
    network: Path | None = None

    def __post_init__(self) -> None:
        require(self.servers >= 0, f"servers is a count of at least 0, not {self.servers}")
        require(
            len(self.endpoints) in (0, self.servers),
            f"{self.servers} servers need {self.servers} endpoints or none, not {len(self.endpoints)}",
        )


NO_SERVERS = Serving(servers=0)
