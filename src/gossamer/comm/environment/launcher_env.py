"""Launcher environment: reads rank and world size from the variables of torchrun, mpirun or srun, or from TF_CONFIG."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist

from gossamer.base import rng
from gossamer.base.host_port import LOOPBACK, is_loopback
from gossamer.errors import ConnectError

DEFAULT_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class JobEnvironment:
    """Place of this process in the job; by default a job of one worker.

    Attributes:
        rank: Rank of this worker, from 0 to world - 1.
        world: Number of workers.
        local_rank: Rank among the workers on this machine.
        local_world: Number of workers on this machine.
        master_address: Host of rank 0, or None if unknown.
        master_port: Port of the rendezvous, or None if unknown.
        launcher: Name of the launcher, for messages.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    master_address: str | None = None
    master_port: int | None = None
    launcher: str = "python"


@dataclass(frozen=True, kw_only=True)
class FoundVariables:
    """A job environment, and the launcher's data about the rendezvous."""

    job: JobEnvironment
    host: str | None = None  # the machine of rank 0, if known
    port: int | None = None  # on that machine, if the launcher reserved one
    identity: str | None = None  # a text that the ranks of this job share with no other job
    remedy: str  # the setting to add if the rendezvous address is missing


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables that is set."""
    for name in names:
        text = environ.get(name, "").strip()
        if text:
            if not re.fullmatch(r"-?[0-9]{1,9}", text):
                raise ConnectError(
                    f"{name}={text[:40]!r} is not a whole number of at most nine digits, so this worker cannot "
                    f"determine its rank. Correct it, or run `unset {name}` for a world of one."
                )
            return int(text)
    return None


def _first(environ: Mapping[str, str], *names: str) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def _explicit(environ: Mapping[str, str]) -> FoundVariables | None:
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank is None and world is None:
        return None
    if rank is None or world is None:
        present, absent = ("WORLD_SIZE", "RANK") if rank is None else ("RANK", "WORLD_SIZE")
        raise ConnectError(
            f"{present} is set and {absent} is not, so this worker cannot determine its rank. "
            f"Set both, or run `unset {present}` for a world of one."
        )
    address = environ.get("MASTER_ADDR", "")
    if world < 1:
        raise ConnectError(f"WORLD_SIZE must be at least 1, got {world}. Set it to the number of workers.")
    alone = world if is_loopback(address) else 1
    local_world = _number(environ, "LOCAL_WORLD_SIZE") or alone
    local_rank = _number(environ, "LOCAL_RANK")
    return FoundVariables(
        job=JobEnvironment(
            rank=rank,
            world=world,
            local_rank=rank % local_world if local_rank is None else local_rank,
            local_world=local_world,
            launcher="torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment",
        ),
        remedy=f"Set MASTER_ADDR=<host of rank 0> MASTER_PORT={DEFAULT_PORT} for every worker",
    )


def _message_passing(
    environ: Mapping[str, str], names: tuple[str, str, str, str], identities: tuple[str, ...], option: str
) -> FoundVariables | None:
    """Read a job that mpirun started. names: variables of rank, size, local rank and local size."""
    rank, world = _number(environ, names[0]), _number(environ, names[1])
    if rank is None or world is None:
        return None
    return FoundVariables(
        job=JobEnvironment(
            rank=rank,
            world=world,
            local_rank=_number(environ, names[2]) or 0,
            local_world=_number(environ, names[3]) or 1,
            launcher="mpirun",
        ),
        identity=_first(environ, *identities),
        remedy=f"Add `{option}` to mpirun's options",
    )


def _open_mpi(environ: Mapping[str, str]) -> FoundVariables | None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, world, local_rank, local_world = (f"OMPI_COMM_WORLD_{name}" for name in names)
    option = f"-x MASTER_ADDR=<host of rank 0> -x MASTER_PORT={DEFAULT_PORT}"
    identities = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE")
    return _message_passing(environ, (rank, world, local_rank, local_world), identities, option)


def _mpich(environ: Mapping[str, str]) -> FoundVariables | None:
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    option = f"-genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT {DEFAULT_PORT}"
    return _message_passing(environ, names, (), option)


def _hydra(environ: Mapping[str, str]) -> FoundVariables | None:
    # MPICH's own launcher, which also runs inside Slurm; srun --mpi=pmi2 sets PMI_RANK but not this.
    return _mpich(environ) if "MPI_LOCALRANKID" in environ else None


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: `node[01-03,07],gpu1` -> `node01`."""
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", head.group() if head else "")


def _tasks_here(counts: str, node: int) -> int:
    """Return the number of tasks on one node, from Slurm's tasks per node such as `2(x3),1`."""
    per_node: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        per_node += [int(count)] * int(times or 1)
    return per_node[node] if node < len(per_node) else 1


def _slurm(environ: Mapping[str, str]) -> FoundVariables | None:
    # Only srun numbers its steps: batch scripts and interactive shells have SLURM_PROCID=0, no SLURM_STEP_ID.
    rank, step = _number(environ, "SLURM_PROCID"), environ.get("SLURM_STEP_ID")
    world = _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or 1
    if rank is None or step is None or world == 1:
        return None
    nodes = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") or ""
    host = first_host(nodes)
    counts = _first(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    here = _tasks_here(counts, _number(environ, "SLURM_NODEID") or 0) if counts else 1
    return FoundVariables(
        job=JobEnvironment(
            rank=rank,
            world=world,
            local_rank=_number(environ, "SLURM_LOCALID") or 0,
            local_world=world if host and host == nodes else here,
            launcher="srun",
        ),
        host=host or None,
        identity=f"{environ.get('SLURM_JOB_ID', '')}.{step}",
        remedy="Add `--export=ALL,MASTER_ADDR=<host of rank 0>` to srun's options",
    )


def _tensorflow(environ: Mapping[str, str]) -> FoundVariables | None:
    # {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}
    text = environ.get("TF_CONFIG", "").strip() or "{}"
    try:
        config = json.loads(text)
        cluster = config.get("cluster", {})
        if not cluster:
            return None
        tasks = [(name, i) for name in TRAINING_TASKS for i in range(len(cluster.get(name, ())))]
        places = [str(cluster[name][i]).rpartition(":") for name, i in tasks]
        hosts, port = [host for host, _, _ in places], int(places[0][2])
        task = str(config["task"]["type"]), int(config["task"]["index"])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConnectError(
            f"TF_CONFIG={text[:200]!r} does not describe a cluster ({type(error).__name__}: {error}), so this worker "
            'cannot determine its rank. Write TF_CONFIG=\'{"cluster": {"worker": ["host0:2222", '
            '"host1:2222"]}, "task": {"type": "worker", "index": 0}}\', or run `unset TF_CONFIG` for a world of one.'
        ) from None
    if task not in tasks:
        raise ConnectError(
            f"TF_CONFIG makes this process task {task[1]} of type {task[0]!r}, but the workers are the {len(tasks)} "
            f"tasks of type {' and '.join(TRAINING_TASKS)} in its cluster. Do not start tasks of type {task[0]!r}: the "
            "workers contain the servers of ParameterServer(), and each worker can evaluate."
        )
    rank = tasks.index(task)
    here = [each for each, host in enumerate(hosts) if host == hosts[rank]]
    return FoundVariables(
        job=JobEnvironment(
            rank=rank,
            world=len(tasks),
            local_rank=here.index(rank),
            local_world=len(here),
            launcher="TF_CONFIG",
        ),
        host=hosts[0],
        port=port,
        identity=json.dumps(cluster, sort_keys=True),
        remedy="Put the host of each worker into TF_CONFIG",
    )


TRAINING_TASKS = ("chief", "worker")  # task types of TensorFlow, in the order of ranks

# In this order: an explicit RANK has priority, and mpirun inside a Slurm job starts its helpers with srun.
LAUNCHERS: tuple[Callable[[Mapping[str, str]], FoundVariables | None], ...] = (
    _explicit,
    _open_mpi,
    _hydra,
    _slurm,
    _mpich,
    _tensorflow,
)


def _find(environ: Mapping[str, str]) -> FoundVariables:
    found = next(filter(None, (launcher(environ) for launcher in LAUNCHERS)), None)
    found = found or FoundVariables(job=JobEnvironment(), remedy="")
    job = found.job
    if not (0 <= job.rank < job.world and 0 <= job.local_rank < job.local_world <= job.world):
        raise ConnectError(
            f"Invalid environment ({job.launcher}): rank {job.rank} of {job.world}, local rank "
            f"{job.local_rank} of {job.local_world} on this machine. Ranks must be from 0 to one less than the "
            "number of workers. Correct the variables, or start all workers with `gossamer run --workers N SCRIPT`."
        )
    return found


def _port(identity: str | None) -> int:
    """Derive a port below the ephemeral range from the job's identity, equal on all ranks."""
    return DEFAULT_PORT if identity is None else 20000 + rng.address("port", identity) % 9000


def detect(environ: Mapping[str, str]) -> JobEnvironment:
    """Return the job that these environment variables describe; a plain `python script.py` is a world of one.

    Raises ConnectError if the variables are invalid, or the address of rank 0 is missing.
    """
    found = _find(environ)
    job = found.job
    if job.world == 1:
        return job
    together = LOOPBACK if job.local_world == job.world else None
    address = environ.get("MASTER_ADDR") or together or found.host
    if address is None:
        raise ConnectError(
            f"This is rank {job.rank} of {job.world} workers on several machines, started by {job.launcher}, "
            f"but no variable has the address of rank 0, so the workers cannot connect. {found.remedy}."
        )
    port = _number(environ, "MASTER_PORT")
    if port is not None and not 0 < port < 65536:
        raise ConnectError(
            f"MASTER_PORT={port} is not a valid port: it must be from 1 to 65535 and equal for all workers. Write "
            f"MASTER_PORT={DEFAULT_PORT}."
        )
    port = port or found.port or _port(found.identity)
    return replace(job, master_address=address, master_port=port)


def run_identity(environ: Mapping[str, str]) -> str:
    """Return a text that all processes of one start of a run share; unique as far as launcher or user named the run."""
    name = _first(environ, "GOSSAMER_RUN", "TORCHELASTIC_RUN_ID") or _find(environ).identity or "without a name"
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"{name}, start {int(attempt) + 1}" if attempt.isdecimal() else name


def here() -> JobEnvironment:
    """Return this process's job. An existing process group overrides rank and world size."""
    if not dist.is_initialized():
        return detect(os.environ)
    return replace(_find(os.environ).job, rank=dist.get_rank(), world=dist.get_world_size())


def is_spawned_alone(job: JobEnvironment) -> bool:
    """Whether multiprocessing started this process, and neither a launcher nor a process group has given it a rank."""
    return job.launcher == "python" and not dist.is_initialized() and multiprocessing.parent_process() is not None
