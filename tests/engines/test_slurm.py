"""Slurm: jobs of srun lose a worker or are preempted, are put back into the queue, and resume."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.paths import ROOT
from support.processes import succeed
from support.resumable_job import ending, write_job
from support.slurm_cluster import slurm_cluster

SECONDS, ATTEMPTS = 400, 5
pytestmark = pytest.mark.timeout(1200)  # a cluster and jobs that start slowly on a busy machine
BATCH = """#!/bin/bash
#SBATCH --requeue --open-mode=append
srun --kill-on-bad-exit=1 --mpi=none {python} {job} {folder} {how}
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two tasks need two cores")
    with slurm_cluster(tmp_path) as environ:
        yield {
            **environ,
            "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT / "src")]),
        }


class Job:
    """A batch job of two tasks."""

    def __init__(self, environ: dict[str, str], folder: Path, how: str) -> None:
        self._environ, self._folder = environ, folder
        batch = folder / "batch.sh"
        batch.write_text(BATCH.format(python=sys.executable, job=write_job(folder), folder=folder, how=how))
        options = ["--parsable", "--nodes=1", "--ntasks=2", "--cpus-per-task=1", f"--output={folder}/output"]
        self._number = self.slurm("sbatch", *options, str(batch)).strip()

    def slurm(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self._environ, cwd=self._folder, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def requeue(self) -> None:
        self.slurm("scontrol", "requeue", self._number)

    def start_at_once(self) -> None:
        """Slurm waits two minutes before it starts a job again."""
        self.wait(lambda: "PENDING" in self.state())
        self.slurm("scontrol", "update", f"JobId={self._number}", "StartTime=now")

    def finish(self) -> None:
        """Wait until the job has completed.

        Slurm starts a job again after two minutes, because the node refuses it for a while after the job's tasks were
        killed: it then fails without an output, and is put back into the queue here.
        """
        for _ in range(ATTEMPTS):
            written = self._written()
            self.wait(lambda: any(each in self.state() for each in ("COMPLETED", "FAILED")))
            if "COMPLETED" in self.state() or self._written() > written:
                break
            self.requeue()
            self.start_at_once()
        assert "COMPLETED" in self.state(), self._output.read_text()

    @property
    def _output(self) -> Path:
        return self._folder / "output"

    def _written(self) -> int:
        return self._output.stat().st_size if self._output.exists() else 0

    def state(self) -> str:
        return self.slurm("squeue", "-h", "-t", "all", "-o", "%T", "-j", self._number)

    def wait(self, is_true: Callable[[], bool]) -> None:
        for _ in range(10 * SECONDS):
            if is_true():
                return
            threading.Event().wait(0.1)
        raise AssertionError(f"job is {self.state()}: {self._output.read_text() if self._output.exists() else ''}")


@pytest.mark.nightly  # as a job of mpirun, and requeued as the next one
@pytest.mark.processes
def test_a_requeued_job_of_slurm_resumes_after_the_loss_of_a_worker(slurm: dict[str, str], tmp_path: Path) -> None:
    (undisturbed := tmp_path / "undisturbed").mkdir()
    (disturbed := tmp_path / "disturbed").mkdir()
    succeed([str(write_job(undisturbed)), str(undisturbed), "never"], 2, timeout_seconds=400)
    job = Job(slurm, disturbed, "lost")
    job.wait(lambda: "FAILED" in job.state())
    job.requeue()
    job.start_at_once()
    job.finish()
    assert ending(disturbed) == ending(undisturbed)._replace(begin=3)


@pytest.mark.processes
def test_a_preempted_job_of_slurm_saves_on_sigterm_and_resumes(slurm: dict[str, str], tmp_path: Path) -> None:
    """Requeuing a running job preempts it: its tasks receive SIGTERM, and SIGKILL after KillWait."""
    job = Job(slurm, tmp_path, "requested")
    job.wait(lambda: (tmp_path / "trains-0").exists() and (tmp_path / "trains-1").exists())
    job.requeue()
    job.start_at_once()
    first = ending(tmp_path)
    job.finish()
    second = ending(tmp_path)
    assert first.begin == 0
    assert second.begin == first.end >= 3
    assert second.end == second.begin + 3
