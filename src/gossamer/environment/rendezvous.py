"""Rendezvous: joins the process group, or raises within seconds, naming the missing ranks and the cause."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from gossamer.environment.launcher_env import JobEnvironment
from gossamer.environment.network_interfaces import choose_interface, interfaces
from gossamer.environment.run_settings import returns
from gossamer.errors import ConnectError

POLL_SECONDS = 0.02
STORE_TIMEOUT = timedelta(minutes=30)
NO_GROUP = "none"


def _failure(job: JobEnvironment, what: str, cause: str) -> ConnectError:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "the system's choice")
    return ConnectError(
        f"Rank {job.rank} of {job.world} could not join: {what} (meeting point "
        f"{job.master_address}:{job.master_port}, interface {interface}). {cause}"
    )


REFUSED = (
    "Nothing listens there: rank 0 was not started or has failed, or MASTER_ADDR or MASTER_PORT is not rank "
    "0's. Start all workers within the same few seconds, and look at rank 0's own message."
)
SILENT = (
    "The address does not answer: it is wrong, its machine is off, or a firewall drops the packets. "
    "Open the port on rank 0's machine, or name another network with `--interface`."
)
NAMELESS = "The name cannot be resolved here. Use rank 0's IP address: MASTER_ADDR=<address>."
TAKEN = (
    "Another program, perhaps an earlier run of yours, already uses this port. Stop it, or choose another: "
    "MASTER_PORT=<a free port>, the same for every worker."
)
SPAWNED = (
    "That is the worker which starts this process: a DataLoader's worker, like any process that is spawned, imports "
    'the script again, which then joins again. Put the program under `if __name__ == "__main__":`'
)
FEW = (
    "Too few workers were started, or some failed before joining: look at their output, and start all of them together."
)
BLOCKED = (
    "A firewall blocks connections between the workers, or the interface is not the one that joins the "
    "machines. Open the ports between them, or name the interface: `gossamer run --interface NAME ...`."
)


def _taken() -> str:
    """Why this rank is taken already. `_inheriting` is how multiprocessing knows that it imports the script again; its
    parent_process() is set only after that."""
    return SPAWNED if getattr(multiprocessing.current_process(), "_inheriting", False) else TAKEN


def _reach(job: JobEnvironment, address: str, port: int, deadline: float) -> None:
    """Wait until the rendezvous address accepts connections.

    A plain socket, because torch's own client prints stack traces and cannot say which of the causes it was.
    """
    while True:
        try:
            socket.create_connection((address, port), max(deadline - time.monotonic(), POLL_SECONDS)).close()
        except OSError as error:
            if time.monotonic() + POLL_SECONDS >= deadline:
                causes = {socket.gaierror: NAMELESS, ConnectionRefusedError: REFUSED}
                cause = causes.get(type(error), SILENT)
                raise _failure(job, f"no connection to rank 0 ({error})", cause) from error
            time.sleep(POLL_SECONDS)
        else:
            return


def _open_store(job: JobEnvironment, seconds: float) -> Store:
    """The rendezvous store: served by rank 0, or by the launcher where it offers one."""
    address, port = job.master_address, job.master_port
    if address is None or port is None:
        raise _failure(job, "no meeting point is known", "Set MASTER_ADDR and MASTER_PORT for every worker.")
    launcher_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = job.rank == 0 and not launcher_serves
    if not serves:
        _reach(job, address, port, time.monotonic() + seconds)
    timeout = timedelta(seconds=seconds)
    try:
        store = TCPStore(address, port, is_master=serves, timeout=timeout, wait_for_workers=False, multi_tenant=True)
    except RuntimeError as error:
        cause = _taken() if "EADDRINUSE" in str(error) else SILENT
        raise _failure(job, str(error).splitlines()[0], cause) from error
    # The launcher's store outlives a restart of its workers: keys of the dead ones must not be read again.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"gossamer/{attempt}", store)


def _everyone(store: Store, job: JobEnvironment, topic: str, value: str, seconds: float) -> list[str]:
    """All-gather `value` under this topic within `seconds`, or raise, naming the missing ranks."""
    keys = [f"{topic}/{rank}" for rank in range(job.world)]
    deadline = time.monotonic() + seconds
    try:
        held = store.compare_set(keys[job.rank], "", value).decode()
        if held != value:
            raise _failure(job, f"another worker ({held}) is there already under rank {job.rank}", _taken())
        while not store.check(keys):
            if time.monotonic() > deadline:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                what = f"{len(missing)} of {job.world} workers are missing after {seconds:g} s, ranks {missing}"
                raise _failure(job, what, FEW)
            time.sleep(POLL_SECONDS)
        return [store.get(key).decode() for key in keys]
    except RuntimeError as error:
        raise _failure(job, f"the meeting point was lost ({str(error).splitlines()[0]})", REFUSED) from error


def _meet(store: Store, job: JobEnvironment, address: str | None, seconds: float) -> set[str]:
    """Exchange addresses, then dial the next rank: a blocked network shows here, not as a hang later.

    Returns the kinds of device that the workers compute on.
    """
    with socket.socket() as listener:
        if address is not None:
            listener.bind((address, 0))
            listener.listen()  # the kernel completes the handshake without accept
        port = listener.getsockname()[1] if address else 0
        hello = f"{socket.gethostname()}|{os.getpid()}|{device_for(job).type}|{address or ''}|{port}"
        hellos = _everyone(store, job, "hello", hello, seconds)
        following = (job.rank + 1) % job.world
        *_, peer, peer_port = hellos[following].split("|")
        outcome = "reached"
        if peer:
            try:
                socket.create_connection((peer, int(peer_port)), seconds / 2).close()
            except OSError as error:
                outcome = f"rank {job.rank} cannot reach rank {following} at {peer} ({error})"
        outcomes = _everyone(store, job, "call", outcome, seconds)
    problems = [outcome for outcome in outcomes if outcome != "reached"]
    if problems:
        raise _failure(job, "; ".join(problems), BLOCKED)
    return {hello.split("|")[2] for hello in hellos}


def device_for(job: JobEnvironment) -> torch.device:
    """The GPU of this worker's own, where the machine has one for it."""
    has_own = torch.cuda.device_count() > job.local_rank
    return torch.device("cuda", job.local_rank) if has_own else torch.device("cpu")


def join(job: JobEnvironment, seconds: float = 10.0) -> str:
    """Join this job's process group and return its backend; a group that exists already is used as it is.

    Ranks missing or unreachable within `seconds` are a ConnectError. Collectives keep torch's timeouts. A restarted
    worker finds no group to join, since the others have formed theirs, and has NO_GROUP.
    """
    if dist.is_initialized():
        return dist.get_backend()
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or choose_interface(job)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    if returns():
        return NO_GROUP
    address = interfaces().get(interface.split(",")[0]) if interface else None
    store = _open_store(job, seconds)
    devices = _meet(store, job, address, seconds)
    store.set_timeout(STORE_TIMEOUT)
    # The same on every rank: NCCL needs a GPU for each, and Gloo moves what lies on some.
    backend = "cpu:gloo,cuda:nccl" if devices == {"cuda"} else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.world)
    except RuntimeError as error:
        raise _failure(job, f"{backend} refused ({str(error).splitlines()[0]})", BLOCKED) from error
    atexit.register(_leave_quietly, os.getpid())
    return backend


def comebacks() -> int:
    """The number of times this worker was restarted alone while the others went on."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "1")) if returns() else 0


def leave() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave_quietly(process: int) -> None:
    # A forked child inherits this call, and the group is not its own. At exit it does not matter
    # that a peer has gone first.
    if os.getpid() == process:
        with contextlib.suppress(RuntimeError):
            leave()
