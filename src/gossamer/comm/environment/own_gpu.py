"""Own GPU: which GPU each worker takes, of those that it sees, so that no two take the same one."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

import torch

from gossamer.comm.environment.launcher_env import JobEnvironment

LISTING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
SLICE = "MIG-"  # how names of parts of a GPU begin, for which torch may tell the name of the whole

Gpus = Sequence[str]  # a name for each GPU that a worker sees, the same to all workers that see it


def visible_gpus(environ: Mapping[str, str]) -> Gpus:
    """Those that this process sees, in torch's order."""
    listed = next((environ[name] for name in LISTING if environ.get(name)), "").split(",")
    numbers = range(torch.cuda.device_count())
    return [_name(number, listed[number].strip() if number < len(listed) else "") for number in numbers]


def _name(number: int, listed: str) -> str:
    """listed: what a variable calls it. Where torch knows no UUID, that text on this machine."""
    if listed.startswith(SLICE):
        return listed
    try:
        return str(torch.cuda.get_device_properties(number).uuid)
    except (AttributeError, RuntimeError):  # a driver that fails here says so where the model is moved, too
        return f"{socket.gethostname()}/{listed or number}"


def own_gpus(seen: Sequence[Gpus]) -> list[int | None]:
    """Of each worker, the number of its own GPU among those that it sees: the first that none before it has taken.
    None where there is none left for it."""
    taken: set[str] = set()
    found: list[int | None] = []
    for gpus in seen:
        own = next((number for number, gpu in enumerate(gpus) if gpu not in taken), None)
        if own is not None:
            taken.add(gpus[own])
        found.append(own)
    return found


def assumed(job: JobEnvironment, environ: Mapping[str, str]) -> list[Gpus]:
    """What the workers of this machine see, up to this one, where they have not told each other: the same; or, where
    Slurm gives each task its own GPUs (--gpus-per-task), no other's."""
    mine = [str(number) for number in range(torch.cuda.device_count())]
    return [mine] if mine and len(mine) == _gpus_per_task(environ) else [mine] * (job.local_rank + 1)


def _gpus_per_task(environ: Mapping[str, str]) -> int:
    """How many GPUs a Slurm step gives each of its tasks alone, as "2" or "a100:2"; 0 where it does not say."""
    said = environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] if "SLURM_PROCID" in environ else ""
    return int(said) if said.isdecimal() else 0
