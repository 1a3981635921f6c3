"""A Slurm cluster of this machine: munged, slurmctld and slurmd as processes on loopback, which end with the block."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SECONDS = 300  # until the node is idle, on a busy machine


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment of a cluster of this machine alone, with its own key, sockets and files in `folder`.

    Skips the test if Slurm is not installed.
    """
    if not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch"))) or os.geteuid():
        pytest.skip("Slurm (slurmctld, slurmd, munge) is not installed here, or this is not root")
    host = os.uname().nodename.split(".")[0]
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [each.getsockname()[1] for each in (one, other)]
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(
        f"""ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthInfo=socket={folder}/munge.socket
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
""",
        encoding="utf-8",
    )
    environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    munge = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", *munge],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D"],
    ]
    log = (folder / "daemons.log").open("wb")
    daemons = [subprocess.Popen(command, env=environ, stdout=log, stderr=log) for command in commands]
    try:
        for _ in range(10 * SECONDS):
            nodes = subprocess.run(
                ["sinfo", "-h", "-o", "%t"], env=environ, capture_output=True, text=True, check=False
            )
            if nodes.stdout.strip() == "idle":
                break
            threading.Event().wait(0.1)
        else:
            raise AssertionError((folder / "daemons.log").read_text(errors="replace"))
        yield environ
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()
        log.close()
