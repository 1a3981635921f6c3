"""Launched job: tells Lightning the ranks that gossamer run, torchrun, mpirun or srun gave to this job's workers."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import ClusterEnvironment

from gossamer.comm.elastic.joined_run import is_elastic
from gossamer.comm.environment import JobEnvironment, here
from gossamer.errors import AttachError


class LaunchedEnvironment(ClusterEnvironment):  # type: ignore[misc]  # Lightning has no types where it is not installed
    """Ranks of a job whose workers all run already."""

    creates_processes_externally = True

    def __init__(self, job: JobEnvironment) -> None:
        super().__init__()
        self._job = job

    @property
    def main_address(self) -> str:
        return self._job.master_address or "127.0.0.1"

    @property
    def main_port(self) -> int:
        return self._job.master_port or 0

    @staticmethod
    def detect() -> bool:
        return launched_job() is not None

    def world_size(self) -> int:
        return self._job.world

    def global_rank(self) -> int:
        return self._job.rank

    def local_rank(self) -> int:
        return self._job.local_rank

    def node_rank(self) -> int:
        """0 on the machine of rank 0; exact where all machines have as many workers."""
        return (self._job.rank - self._job.local_rank) // self._job.local_world

    def set_world_size(self, size: int) -> None:
        """The launcher has decided."""

    def set_global_rank(self, rank: int) -> None:
        """The launcher has decided."""


def launched_job() -> JobEnvironment | None:
    """The job in this process's environment; None where Lightning is to start the workers, or has started this one.

    Raises AttachError in an elastic run.
    """
    if is_elastic():
        raise AttachError(
            "this is an elastic run, whose workers come and go, and Lightning's samplers and loops are made for a "
            "number that stays: a rank that changes would train on another's data. Start it with a fixed number, "
            "gossamer run --workers 4 SCRIPT, or write the loop with gossamer.attach."
        )
    if "RANK" not in os.environ and {"NODE_RANK", "LOCAL_RANK"} <= os.environ.keys():
        return None  # Lightning's own launcher tells its workers this much
    job = here()
    return None if job.launcher == "python" and job.world == 1 else job
