"""Host information: processor, cores and versions of this machine, and the GPU of each of its workers."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from gossamer.comm.environment.launcher_env import JobEnvironment


def machine() -> dict[str, str | int]:
    return {
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def processor(table: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name if the system reports one, else its architecture."""
    if table.exists():
        for line in table.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return f"{value.strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()


# -- GPUs --------------------------------------------------------------------------------------------------------------

LISTING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
SLICE = "MIG-"  # prefix of names of parts of a GPU, for which torch may report the name of the whole

Gpus = Sequence[str]  # a name for each GPU that a worker sees, equal for all workers that see it


def visible_gpus(environ: Mapping[str, str]) -> Gpus:
    """Return names of the GPUs that this process sees, in torch's order."""
    listed = next((environ[name] for name in LISTING if environ.get(name)), "").split(",")
    numbers = range(torch.cuda.device_count())
    return [_name(number, listed[number].strip() if number < len(listed) else "") for number in numbers]


def _name(number: int, listed: str) -> str:
    """Name of a GPU: its UUID, or without one the host and `listed`, its entry in the environment variable."""
    if listed.startswith(SLICE):
        return listed
    try:
        return str(torch.cuda.get_device_properties(number).uuid)
    except (AttributeError, RuntimeError):  # a broken driver also raises when the model is moved
        return f"{socket.gethostname()}/{listed or number}"


def own_gpus(seen: Sequence[Gpus]) -> list[int | None]:
    """Assign to each worker the first GPU that it sees and that no earlier worker has.

    Returns the GPU's index among those that the worker sees, or None if no GPU is left for it.
    """
    taken: set[str] = set()
    found: list[int | None] = []
    for gpus in seen:
        own = next((number for number, gpu in enumerate(gpus) if gpu not in taken), None)
        if own is not None:
            taken.add(gpus[own])
        found.append(own)
    return found


def assumed(job: JobEnvironment, environ: Mapping[str, str]) -> list[Gpus]:
    """Guess which GPUs the workers of this machine see, up to this one, if they have not exchanged them.

    They are assumed to see the same GPUs or, if Slurm gives each task its own (--gpus-per-task), disjoint ones.
    """
    own_devices = [str(number) for number in range(torch.cuda.device_count())]
    return (
        [own_devices]
        if own_devices and len(own_devices) == _gpus_per_task(environ)
        else [own_devices] * (job.local_rank + 1)
    )


def _gpus_per_task(environ: Mapping[str, str]) -> int:
    """Number of GPUs that a Slurm step gives to each of its tasks, as "2" or "a100:2"; 0 if unspecified."""
    message = environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] if "SLURM_PROCID" in environ else ""
    return int(message) if message.isdecimal() else 0
