"""Rendezvous: forms the process group once all ranks are present, or raises with the missing ranks and the cause."""

from __future__ import annotations

import atexit
import contextlib
import errno
import ipaddress
import multiprocessing
import os
import re
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gossamer.comm.environment.interruptible_call import interruptible
from gossamer.comm.environment.launcher_env import JobEnvironment, run_identity
from gossamer.comm.environment.meeting import COMING, REACHING, STANDING, Hello, RunIdentity
from gossamer.comm.environment.meeting_member import Failed, Foreign, MeetingMember, Refused, Unreachable, attend
from gossamer.comm.environment.meeting_place import MeetingPlace, NotAnnounced, meeting_place
from gossamer.comm.environment.meeting_server import MeetingServer
from gossamer.comm.environment.network_interfaces import choose_interface, interfaces
from gossamer.comm.environment.run_settings import returns
from gossamer.comm.environment.run_token import run_token
from gossamer.comm.environment.wait_progress import Missing, WaitProgress, named_ranks
from gossamer.comm.environment.wait_timeout import VARIABLE, engine_timeout, timeout_seconds
from gossamer.errors import ConnectError, LeftWhileJoining

NOT_COME = "Such a rank is still importing or loading, is queued, was not started or has failed. Check its output."


class JoinProgress:
    """Reports missing ranks: in rank 0, or in one rank per machine while rank 0 itself is missing."""

    def __init__(
        self,
        job: JobEnvironment,
        seconds: float,
        server: MeetingServer | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._server = job, server
        self._progress = WaitProgress(job.rank, "gossamer.init()", seconds, clock=clock)
        # If rank 0 belongs to this machine, rank 1 usually does, too
        self._reports = job.local_rank == 0 or job.rank == 1

    def for_rank_0(self, problem: OSError) -> None:
        """Report that rank 0 is unreachable for now."""
        found = Missing(f"rank 0 of {self._job.world}", f"No connection to it ({problem}). {likely_cause(problem)}")
        self._progress.look(lambda: found if self._reports else None)

    def for_all(self, topic: str) -> Callable[[], None]:
        """Return a callback for a wait for the ranks that have sent no text on this topic."""
        return lambda: self._progress.look(lambda: self._missing(topic))

    def _missing(self, topic: str) -> Missing | None:
        if self._server is None or not (ranks := self._server.missing(topic)):
            return None
        return Missing(f"{named_ranks(ranks)} of {self._job.world}", NOT_COME)

    def end(self) -> None:
        self._progress.end()


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


DIAL_SECONDS = 10.0  # enough to retransmit a lost first packet three times
MOST_AT_ONCE = 256  # concurrent connection attempts, each of which uses a descriptor

Address = tuple[str, int]


@contextmanager
def listening(address: str | None, callers: int) -> Iterator[int]:
    """Yield a port on which `callers` processes can dial this one; 0 if its address is unknown."""
    with socket.socket() as listener:
        if address is not None:
            listener.bind((address, 0))
            listener.listen(callers)  # the kernel completes the handshake without accept
        yield listener.getsockname()[1] if address else 0


def unreachable(places: Mapping[int, Address], seconds: float = DIAL_SECONDS) -> dict[int, str]:
    """Dial all places, and return the errors by rank of those that do not answer within `seconds`."""
    problems: dict[int, str] = {}
    waiting = iter(places.items())
    while some := dict(islice(waiting, MOST_AT_ONCE)):
        problems |= _dial_all(some, seconds)
    return problems


def _dial_all(places: Mapping[int, Address], seconds: float) -> dict[int, str]:
    outcomes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    with ExitStack() as links, selectors.DefaultSelector() as selector:
        for rank, place in places.items():
            link = links.enter_context(socket.socket())
            link.setblocking(False)
            if (outcome := link.connect_ex(place)) in (errno.EINPROGRESS, errno.EWOULDBLOCK):  # the last on Windows
                selector.register(link, selectors.EVENT_WRITE, rank)
            else:
                outcomes[rank] = outcome
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                outcomes[key.data] = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                selector.unregister(key.fileobj)
    found = {rank: outcomes.get(rank, errno.ETIMEDOUT) for rank in places}
    return {rank: os.strerror(outcome) for rank, outcome in found.items() if outcome}


SETTLING_SECONDS = 1.5  # at exit, for a thread that is forming a group of which a rank has left
STORE_TIMEOUT = timedelta(minutes=30)
MOST_NAMED = 8  # unreachable ranks that one rank lists
NO_GROUP = "none"
# Gloo reads the addresses of all ranks in one request to the store, instead of two for each rank. Its connections of
# all pairs take longer, but TORCH_GLOO_LAZY_INIT=1, which leaves them out, is the user's choice: in torch 2.13, an
# operation waits without a limit for a rank that ended before their first connection, if that rank should have dialed.
BATCHED_STORE = "GLOO_ENABLE_STORE_V2_API"
_server: MeetingServer | None = None  # in rank 0; refuses late workers while the group exists
_member: MeetingMember | None = None  # reports ranks that leave while the group exists
_store: Store | None = None  # of the process group
_seen: Sequence[Gpus] = ()  # the GPUs that each rank reported at the meeting


def _join(job: JobEnvironment, address: str | None, seconds: float) -> str:
    """Meet, form the process group, and end the meeting once every rank has formed it. Returns the backend."""
    global _server, _member, _seen
    check_address(job)
    identity = RunIdentity(run=run_identity(os.environ), world=job.world, token=run_token() or b"")
    place = meeting_place(job, address)
    store = ""
    if job.rank == 0:
        leave_meeting()
        _server = MeetingServer(place.listen(), identity)
        store = f"{place.store_port()}/{secrets.token_hex(16)}"
    with listening(address, callers=job.world) as port:
        hello = Hello(
            run=identity.run,
            world=job.world,
            rank=job.rank,
            who=f"{socket.gethostname()}, process {os.getpid()}",
            gpus=",".join(visible_gpus(os.environ)),
            address=address or "",
            port=port,
            store=store,
        )
        wait = JoinProgress(job, seconds, _server)
        with contextlib.ExitStack() as failing:
            member = attend(place.locate, identity, hello, seconds, wait.for_rank_0)
            failing.callback(member.close)
            hellos = [Hello.read(text) for text in member.everyone(COMING, seconds, look=wait.for_all(COMING))]
            problems = member.everyone(REACHING, seconds, _out_of_reach(job, hellos), wait.for_all(REACHING))
            if any(problems):
                raise join_error(job, "; ".join(filter(None, problems)), BLOCKED)
            seen = [each.gpus.split(",") if each.gpus else [] for each in hellos]
            # Equal on every rank: NCCL needs a GPU per rank, and Gloo can move tensors of the GPUs that exist
            backend = "gloo" if None in own_gpus(seen) else "cpu:gloo,cuda:nccl"
            _form_group(job, backend, place, hellos[0], member, wait)
            member.everyone(STANDING, seconds, "", wait.for_all(STANDING))
            failing.pop_all()
            if _member is not None:  # of an earlier group
                _member.close()
            _member, _seen = member, seen
    wait.end()
    return backend


def _out_of_reach(job: JobEnvironment, hellos: list[Hello]) -> str:
    """Describe the ranks that this one cannot dial. torch connects every pair, and would wait for those silently."""
    others = {each.rank: (each.address, each.port) for each in hellos if each.address and each.rank != job.rank}
    problems = unreachable(others)
    named = [f"rank {rank} at {others[rank][0]} ({problem})" for rank, problem in islice(problems.items(), MOST_NAMED)]
    if len(problems) > MOST_NAMED:
        named.append(f"{len(problems) - MOST_NAMED} more")
    return f"rank {job.rank} cannot reach {', '.join(named)}" if problems else ""


def _form_group(
    job: JobEnvironment, backend: str, place: MeetingPlace, rank_0: Hello, member: MeetingMember, wait: JoinProgress
) -> None:
    """Form torch's process group, and watch for ranks that leave: torch alone would wait for half an hour."""
    port, prefix = rank_0.store.split("/")

    def form() -> None:
        try:
            found = place.store(int(port), member.address_of_meeting)
            found.set_timeout(STORE_TIMEOUT)
            # The prefix is unique per meeting, so that keys of an earlier one in a launcher's store are not read
            store: Store = PrefixStore(f"gossamer/{prefix}", found)
            _keep_store(store)
            dist.init_process_group(backend, store=store, rank=job.rank, world_size=job.world, timeout=engine_timeout())
        except Exception as problem:  # a backend may raise any class
            message = (str(problem).splitlines() or [type(problem).__name__])[0]
            raise join_error(job, f"{backend} refused ({message})", BLOCKED) from problem

    def look() -> None:
        wait.for_all(STANDING)()
        member.watch(0.0)

    # Threads that wait for rank 0's store return when it closes, so rank 0 need not wait for its thread
    interruptible(form, look, SETTLING_SECONDS if job.rank else 0.0)


def _keep_store(store: Store) -> None:
    global _store
    _store = store


def group_store() -> Store | None:
    """Return the store of the process group that was joined in this process; None without a group.

    Its keys are specific to this start of the job. Without a launcher, rank 0 hosts it.
    """
    return _store


def leave_meeting() -> None:
    """Leave the meeting; in rank 0, end it."""
    global _server, _member, _seen, _store
    _seen, _store = (), None
    if _member is not None:
        _member.close()
        _member = None
    if _server is not None:
        _server.close()
        _server = None


def gone() -> str:
    """The first rank that left after the group was formed, as `rank 2 (host, process 17)`; empty if none is known."""
    return "" if _member is None else _member.gone


def device_for(job: JobEnvironment) -> torch.device:
    """Return this worker's own GPU, or the CPU if no GPU is left for it.

    Assigned from the GPUs that all ranks reported at the meeting. Without a meeting in this process, all workers of a
    machine are assumed to see the same GPUs.
    """
    own = own_gpus(_seen[: job.rank + 1] or assumed(job, os.environ))[-1]
    return torch.device("cpu") if own is None else torch.device("cuda", own)


def join(job: JobEnvironment, seconds: float | None = None) -> str:
    """Join this job's process group and return its backend. An existing group is used as it is.

    Args:
        job: Place of this process in the job.
        seconds: How long to wait for all ranks. None: GOSSAMER_TIMEOUT, which also bounds the group's collectives.

    Returns:
        The backend, or NO_GROUP in a restarted worker, because the other ranks have already formed their group.

    Raises:
        ConnectError: Ranks did not join in time, or (within seconds) two ranks cannot reach each other. On every rank.
        LeftWhileJoining: A rank left before the group was formed. On every rank.
    """
    if dist.is_initialized():
        return dist.get_backend()
    seconds = timeout_seconds() if seconds is None else seconds
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or choose_interface(job)
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    os.environ.setdefault(BATCHED_STORE, "1")
    if returns():
        return NO_GROUP
    address = interfaces().get(interface.split(",")[0]) if interface else None
    try:
        with explained(job):
            backend = _join(job, address, seconds)
    except BaseException:
        leave_meeting()
        raise
    atexit.register(_leave_quietly, os.getpid())
    return backend


def comebacks() -> int:
    """How many times this worker was restarted alone while the other workers continued."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "1")) if returns() else 0


def data_order() -> int:
    """The number of the order in which this process draws its part of the data. Without lock step, processes that may
    have the same part, because one replaces the other or joined later, have different orders."""
    return comebacks() or int(os.environ.get("GOSSAMER_DATA_ORDER", "0"))


def leave() -> None:
    """Destroy the process group, if there is one."""
    leave_meeting()
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave_quietly(process: int) -> None:
    # A forked child inherits this call, but the group is not its own. At exit it does not matter
    # that a peer has ended first.
    if os.getpid() == process:
        with contextlib.suppress(RuntimeError):
            leave()


# -- cause and remedy of a failed rendezvous ---------------------------------------------------------------------------

REFUSED = (
    "Nothing listens there: rank 0 was not started, is still importing or has failed, or MASTER_ADDR or MASTER_PORT is "
    "not rank 0's. Check rank 0's output."
)
NOT_ANNOUNCED = "Rank 0 is still importing or loading, or failed before gossamer.init(). Check its output."
SILENT = (
    "The address does not answer: it is wrong, its machine is off or booting, or a firewall drops the packets. "
    "Open the port on rank 0's machine, or choose another network with `--interface`."
)
NAMELESS = (
    "The name cannot be resolved on this machine: it is misspelled, or rank 0's machine is not up yet. Rank 0's "
    "IP address always works: MASTER_ADDR=<address>."
)
TAKEN = (
    "Another program, perhaps an earlier run of yours, already uses this port. Stop it, or choose another: "
    "MASTER_PORT=<a free port>, the same for every worker. To keep workers of an earlier run out, give all workers of "
    "this run a common name: GOSSAMER_RUN=<a name>."
)
FOREIGN = (
    "Another program uses this port. Stop it, or choose another port, the same for every worker: "
    "MASTER_PORT=<a free port>. If rank 0 was started, it reports the same problem."
)
GONE = (
    "Its output has the cause, unless it was killed from outside: check that first. All workers were notified; restart "
    "all of them."
)
STRAY = "This worker was rejected, and the others keep waiting for the right one."
SPAWNED = (
    "That worker started this process: a DataLoader worker, like any spawned process, imports the script again, which "
    'then joins again. Put the program under `if __name__ == "__main__":`'
)
LATE = f"To wait longer, set {VARIABLE}=7200 (seconds) for every worker."
FEW = f"Too few workers were started, or some failed before joining: check their output. {LATE}"
BLOCKED = (
    "A firewall blocks connections between the workers, or the interface is not on the network that connects the "
    "machines. Open the ports between them, or name the interface: `gossamer run --interface NAME ...`."
)


def join_error(job: JobEnvironment, what: str, cause: str, kind: type[ConnectError] = ConnectError) -> ConnectError:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "the system's choice")
    return kind(
        f"Rank {job.rank} of {job.world} could not join: {what} (meeting point "
        f"{job.master_address}:{job.master_port}, interface {interface}). {cause}".rstrip()
    )


def check_address(job: JobEnvironment) -> None:
    """Reject an invalid MASTER_ADDR at once, without waiting for a machine to start. Raises ConnectError."""
    if job.master_address is None or job.master_port is None:
        raise join_error(job, "the rendezvous address is unknown", "Set MASTER_ADDR and MASTER_PORT for every worker.")
    try:
        ipaddress.ip_address(job.master_address)
    except ValueError:
        labels = job.master_address.rstrip(".").split(".")
        if not all(re.fullmatch(r"[\w-]{1,63}", label) for label in labels) or labels[-1].isdecimal():
            raise join_error(
                job,
                f"MASTER_ADDR={job.master_address[:60]!r} is neither an IP address nor a host name",
                "Write rank 0's address without a port: MASTER_ADDR=10.0.0.1 MASTER_PORT=29500",
            ) from None


def _taken() -> str:
    """Remedy if this rank is already present. multiprocessing sets `_inheriting` while a spawned process imports the
    script again; parent_process() is only set afterwards."""
    return SPAWNED if getattr(multiprocessing.current_process(), "_inheriting", False) else TAKEN


@contextmanager
def explained(job: JobEnvironment) -> Iterator[None]:
    """Convert a failure of the rendezvous into a ConnectError with cause and remedy."""
    try:
        yield
    except Failed as failed:
        if failed.left:
            raise join_error(job, str(failed), GONE, LeftWhileJoining) from None
        raise join_error(job, str(failed), FEW) from None
    except Refused as refused:
        raise join_error(job, f"rank 0 refused it: {refused}", _taken() if refused.taken else STRAY) from None
    except Foreign as foreign:
        raise join_error(job, str(foreign), FOREIGN) from None
    except FileExistsError as held:
        raise join_error(job, str(held), _taken()) from None
    except Unreachable as unreachable:
        raise _no_connection(job, unreachable.problem) from None
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            raise join_error(job, f"the meeting point cannot be opened ({problem})", _taken()) from problem
        raise _no_connection(job, problem) from problem


def _no_connection(job: JobEnvironment, problem: OSError) -> ConnectError:
    return join_error(job, f"no connection to rank 0 ({problem})", f"{likely_cause(problem)} {LATE}")


def likely_cause(problem: OSError) -> str:
    """Return likely causes and remedies if rank 0 cannot be reached."""

    causes = {socket.gaierror: NAMELESS, ConnectionRefusedError: REFUSED, NotAnnounced: NOT_ANNOUNCED}
    return causes.get(type(problem), SILENT)
