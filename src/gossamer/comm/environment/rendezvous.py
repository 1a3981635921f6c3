"""Rendezvous: forms the process group once all ranks are present, or raises with the missing ranks and the cause."""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gossamer.base.units import first_line
from gossamer.comm.environment.host_info import Gpus, assumed, own_gpus, visible_gpus
from gossamer.comm.environment.interruptible_call import interruptible
from gossamer.comm.environment.launcher_env import JobEnvironment, run_identity
from gossamer.comm.environment.listening import listening, unreachable
from gossamer.comm.environment.meeting import COMING, REACHING, STANDING, Hello, RunIdentity
from gossamer.comm.environment.meeting_member import MeetingMember, attend
from gossamer.comm.environment.meeting_place import (
    BLOCKED,
    MeetingPlace,
    check_address,
    explained,
    join_error,
    likely_cause,
    meeting_place,
)
from gossamer.comm.environment.meeting_server import MeetingServer
from gossamer.comm.environment.network_interfaces import choose_interface, interfaces
from gossamer.comm.environment.run_settings import returns
from gossamer.comm.environment.run_token import run_token
from gossamer.comm.environment.wait_progress import Missing, WaitProgress, named_ranks
from gossamer.comm.environment.wait_timeout import engine_timeout, timeout_seconds

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
            raise join_error(job, f"{backend} refused ({first_line(problem)})", BLOCKED) from problem

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
