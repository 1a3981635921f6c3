"""Rendezvous: joins the process group, or raises within seconds, naming the missing ranks and the cause."""

from __future__ import annotations

import atexit
import contextlib
import errno
import multiprocessing
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gossamer.environment.launcher_env import JobEnvironment, run_identity
from gossamer.environment.meeting import COMING, REACHING, STANDING, Hello, RunIdentity
from gossamer.environment.meeting_member import Failed, Foreign, Member, Refused, Unreachable, attend
from gossamer.environment.meeting_place import MeetingPlace, meeting_place
from gossamer.environment.meeting_server import MeetingServer
from gossamer.environment.network_interfaces import choose_interface, interfaces
from gossamer.environment.run_settings import returns
from gossamer.environment.run_token import run_token
from gossamer.errors import ConnectError, LeftWhileJoining

JOIN_SECONDS = 10.0  # in which all workers must have come
POLL_SECONDS = 0.02
SETTLING_SECONDS = 1.5  # at exit, for a thread that forms a group of which a rank has left
STORE_TIMEOUT = timedelta(minutes=30)
NO_GROUP = "none"
_server: MeetingServer | None = None  # rank 0's, which refuses latecomers as long as the group is there


def _failure(job: JobEnvironment, what: str, cause: str, kind: type[ConnectError] = ConnectError) -> ConnectError:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "the system's choice")
    return kind(
        f"Rank {job.rank} of {job.world} could not join: {what} (meeting point "
        f"{job.master_address}:{job.master_port}, interface {interface}). {cause}".rstrip()
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
    "MASTER_PORT=<a free port>, the same for every worker. Workers that share a name, GOSSAMER_RUN=<a name>, take none "
    "of an earlier run for theirs."
)
FOREIGN = (
    "Another program uses this port: stop it, or choose another, the same for every worker: MASTER_PORT=<a free port>. "
    "If rank 0 was started, it has said the same."
)
GONE = (
    "Its own output says why, unless it was killed from outside: look there first. All workers were told; start all of "
    "them again."
)
STRAY = "This worker was not taken, and the others go on waiting for the one that belongs to them."
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


@contextmanager
def _explained(job: JobEnvironment) -> Iterator[None]:
    """Turn what goes wrong at the meeting into a ConnectError that says what to do."""
    try:
        yield
    except Failed as failed:
        if failed.left:
            raise _failure(job, str(failed), GONE, LeftWhileJoining) from None
        raise _failure(job, str(failed), FEW) from None
    except Refused as refused:
        raise _failure(job, f"rank 0 refused it: {refused}", _taken() if refused.taken else STRAY) from None
    except Foreign as foreign:
        raise _failure(job, str(foreign), FOREIGN) from None
    except FileExistsError as held:
        raise _failure(job, str(held), _taken()) from None
    except Unreachable as unreachable:
        raise _unreachable(job, unreachable.problem) from unreachable.problem
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            raise _failure(job, f"the meeting point cannot be opened ({problem})", _taken()) from problem
        raise _unreachable(job, problem) from problem


def _unreachable(job: JobEnvironment, problem: OSError) -> ConnectError:
    causes = {socket.gaierror: NAMELESS, ConnectionRefusedError: REFUSED}
    return _failure(job, f"no connection to rank 0 ({problem})", causes.get(type(problem), SILENT))


def _join(job: JobEnvironment, address: str | None, seconds: float) -> str:
    """Meet, form the process group, and part when it stands for all. Returns its backend."""
    global _server
    if job.master_address is None or job.master_port is None:
        raise _failure(job, "no meeting point is known", "Set MASTER_ADDR and MASTER_PORT for every worker.")
    identity = RunIdentity(run=run_identity(os.environ), world=job.world, token=run_token() or b"")
    place = meeting_place(job, address, seconds)
    store = ""
    if job.rank == 0:
        leave_meeting()
        _server = MeetingServer(place.listen(), identity)
        store = f"{place.store_port()}/{secrets.token_hex(16)}"
    with _listener(address) as port:
        hello = Hello(
            run=identity.run,
            world=job.world,
            rank=job.rank,
            who=f"{socket.gethostname()}, process {os.getpid()}",
            device=device_for(job).type,
            address=address or "",
            port=port,
            store=store,
        )
        with contextlib.closing(attend(place.locate, identity, hello, seconds)) as member:
            hellos = [Hello.read(text) for text in member.everyone(COMING, seconds)]
            _check_reach(job, member, hellos, seconds)
            # The same on every rank: NCCL needs a GPU for each, and Gloo moves what lies on some.
            backend = "cpu:gloo,cuda:nccl" if {each.device for each in hellos} == {"cuda"} else "gloo"
            _form_group(job, backend, place, hellos[0], member)
    return backend


@contextmanager
def _listener(address: str | None) -> Iterator[int]:
    """The port where this rank can be dialed; 0 where its address is not known."""
    with socket.socket() as listener:
        if address is not None:
            listener.bind((address, 0))
            listener.listen()  # the kernel completes the handshake without accept
        yield listener.getsockname()[1] if address else 0


def _check_reach(job: JobEnvironment, member: Member, hellos: list[Hello], seconds: float) -> None:
    """Dial the next rank: a blocked network shows here, not as a hang later."""
    following = hellos[(job.rank + 1) % job.world]
    outcome = ""
    if following.address:
        try:
            socket.create_connection((following.address, following.port), seconds / 2).close()
        except OSError as error:
            outcome = f"rank {job.rank} cannot reach rank {following.rank} at {following.address} ({error})"
    problems = [said for said in member.everyone(REACHING, seconds, outcome) if said]
    if problems:
        raise _failure(job, "; ".join(problems), BLOCKED)


def _form_group(job: JobEnvironment, backend: str, place: MeetingPlace, rank_0: Hello, member: Member) -> None:
    """Form torch's process group in a thread, while this one listens for who leaves: torch would wait half an hour."""
    port, prefix = rank_0.store.split("/")
    problems: list[BaseException] = []

    def form() -> None:
        try:
            found = place.store(int(port), member.address_of_meeting)
            found.set_timeout(STORE_TIMEOUT)
            # A name of this meeting's own: what another has left in a launcher's store must not be read again
            store: Store = PrefixStore(f"gossamer/{prefix}", found)
            dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.world)
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=form, name="gossamer-join", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            member.watch(POLL_SECONDS)
    except BaseException:
        # One that comes back from torch while the interpreter ends aborts the process, and they come back when rank 0's
        # store ends: rank 0 goes first
        atexit.register(thread.join, SETTLING_SECONDS if job.rank else 0.0)
        raise
    if problems:
        said = (str(problems[0]).splitlines() or [type(problems[0]).__name__])[0]
        raise _failure(job, f"{backend} refused ({said})", BLOCKED) from problems[0]
    member.everyone(STANDING, STORE_TIMEOUT.total_seconds(), "")


def leave_meeting() -> None:
    """End rank 0's meeting, if this process has it."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


def device_for(job: JobEnvironment) -> torch.device:
    """The GPU of this worker's own, where the machine has one for it."""
    has_own = torch.cuda.device_count() > job.local_rank
    return torch.device("cuda", job.local_rank) if has_own else torch.device("cpu")


def join(job: JobEnvironment, seconds: float = JOIN_SECONDS) -> str:
    """Join this job's process group and return its backend; a group that exists already is used as it is.

    Ranks missing or unreachable within `seconds` are a ConnectError, and one that leaves before the group stands is a
    LeftWhileJoining, at every rank. Collectives keep torch's timeouts. A restarted worker finds no group to join, since
    the others have formed theirs, and has NO_GROUP.
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
    try:
        with _explained(job):
            backend = _join(job, address, seconds)
    except BaseException:
        leave_meeting()
        raise
    atexit.register(_leave_quietly, os.getpid())
    return backend


def comebacks() -> int:
    """The number of times this worker was restarted alone while the others went on."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "1")) if returns() else 0


def leave() -> None:
    """Destroy the process group, if there is one."""
    leave_meeting()
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave_quietly(process: int) -> None:
    # A forked child inherits this call, and the group is not its own. At exit it does not matter
    # that a peer has gone first.
    if os.getpid() == process:
        with contextlib.suppress(RuntimeError):
            leave()
