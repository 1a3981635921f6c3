"""MPI: a job of mpirun loses a worker, and resumes with the same bits when it is started again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import environment, succeed
from support.resumable_job import ending, write_job

OF_OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on this machine"),
    pytest.mark.timeout(900),  # three jobs, which start slowly on a busy machine
]


def mpirun(job: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return subprocess.run(
        [
            "mpirun",
            "-n",
            "2",
            *as_root,
            "--oversubscribe",
            "--bind-to",
            "none",
            sys.executable,
            str(job),
            str(folder),
            "lost",
        ],
        env={name: value for name, value in environment(0, 2, 0).items() if name not in OF_OTHERS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.processes
def test_a_job_of_mpirun_resumes_after_the_loss_of_a_worker(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    (undisturbed := tmp_path / "undisturbed").mkdir()
    (disturbed := tmp_path / "disturbed").mkdir()
    succeed([str(job), str(undisturbed), "never"], 2, timeout_seconds=400)
    lost = mpirun(job, disturbed)
    assert lost.returncode != 0, lost.stdout
    assert "signal 9" in lost.stdout
    resumed = mpirun(job, disturbed)
    assert resumed.returncode == 0, resumed.stdout
    assert ending(disturbed) == ending(undisturbed)._replace(begin=3)
