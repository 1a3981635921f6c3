"""Basics: init, ranks, process sets and handles, which every front end of a framework shares.

A front end makes calls (calls.py), submits them here, and converts its arrays to torch tensors and back.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from gossamer import events
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.transport import Transport
from gossamer.comm.environment.run_settings import is_elastic
from gossamer.comm.runtime.worker_scope import WorkerScope, current_worker
from gossamer.errors import AttachError, PeerLost
from gossamer.horovod.calls import BarrierCall, CollectiveCall, ReductionOp
from gossamer.horovod.exceptions import HorovodInternalError
from gossamer.horovod.negotiation import Lane, LaneTransport, PendingCall, RoundSettings
from gossamer.horovod.timeline import CallTimeline
from gossamer.train.session.transport_setup import transport_for
from gossamer.train.world_state import current as current_world

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "barrier",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

Average, Sum, Adasum = ReductionOp.AVERAGE, ReductionOp.SUM, ReductionOp.ADASUM
Min, Max, Product = ReductionOp.MIN, ReductionOp.MAX, ReductionOp.PRODUCT

MakeTransport = Callable[
    [Sequence[int]], Transport
]  # of a group of ranks that contains this one; every rank of the job calls it


class ProcessSet:
    """Ranks that run collective calls together.

    Args:
        ranks: of the job. Pass the set to `init(process_sets=[...])` or `add_process_set`, on every rank.
    """

    process_set_id: int | None = None
    mpi_comm: None = None  # there is no MPI

    def __init__(self, ranks: Iterable[int]) -> None:
        given = list(ranks) if isinstance(ranks, Iterable) else [ranks]
        if not isinstance(ranks, Iterable) or any(type(rank) is not int for rank in given):
            raise ValueError("ProcessSet takes a list of ranks. Example: ProcessSet([0, 2])")
        self._ranks: list[int] | None = sorted(given)

    @property
    def ranks(self) -> list[int]:
        """The ranks of the set, ascending."""
        if self._ranks is None:
            return list(range(size()))
        return self._ranks

    def included(self) -> bool:
        """Whether this rank is in the set."""
        return rank() in self.ranks

    def size(self) -> int | None:
        """The number of ranks; None before the set is added."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This rank's place in the set; None before the set is added. Raises ValueError outside of the set."""
        if self.process_set_id is None:
            return None
        if not self.included():
            raise ValueError(f"rank {rank()} is not in {self}. Call rank() only where process_set.included().")
        return self.ranks.index(rank())

    def __repr__(self) -> str:
        known = self._ranks is not None or is_initialized()
        ranks = self.ranks if known else None
        return f"ProcessSet(process_set_id={self.process_set_id}, {ranks=}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
global_process_set._ranks, global_process_set.process_set_id = None, 0


class Context:
    """One worker between init and shutdown."""

    def __init__(self, rank: int, local_rank: int, size: int, make: MakeTransport, simulated: bool = False) -> None:
        """simulated: this worker is a thread, and sessions of all ranks use the lanes, too."""
        self.rank, self.local_rank, self.size, self.simulated = rank, local_rank, size, simulated
        self._make, self.timeline = make, _timeline_of_environment(rank)
        self._settings = _round_settings()
        everyone = make(range(size))
        hosts = [json.loads(text) for text in everyone.all_gather_text(json.dumps(socket.gethostname()))]
        self.local_size = hosts.count(hosts[rank])
        names = list(dict.fromkeys(hosts))
        self.cross_rank, self.cross_size = names.index(hosts[rank]), len(names)
        self._lanes: dict[int, Lane] = {0: self._lane(everyone, range(size))}
        self._sets: dict[int, ProcessSet] = {0: global_process_set}
        self._next_handle, self._sessions = 0, 0
        self._handles: dict[int, PendingCall] = {}
        self.exchanges: WeakKeyDictionary[Any, None] = WeakKeyDictionary()  # of optimizers, in the order of their first

    def _lane(self, transport: Transport, ranks: Sequence[int]) -> Lane:
        return Lane(transport, ranks, self._settings, lambda: self.timeline)

    def check_known(self, process_set: ProcessSet) -> None:
        """Raises ValueError for a set that was not added, or was removed."""
        if process_set.process_set_id not in self._sets:
            raise ValueError(f"{process_set} is not known. Call hvd.add_process_set on every rank first.")

    def lane(self, process_set: ProcessSet) -> Lane:
        """Raises ValueError for a set that is not known, and where this rank is not in the set."""
        self.check_known(process_set)
        number = process_set.process_set_id
        if number not in self._lanes:
            raise ValueError(
                f"rank {self.rank} is not in {process_set}. Make the call only where process_set.included()."
            )
        return self._lanes[number]

    def set_of(self, number: int) -> ProcessSet:
        """Raises HorovodInternalError for a number that no set has."""
        if number not in self._sets:
            raise HorovodInternalError(f"no process set has the number {number}. Pass process_set.process_set_id.")
        return self._sets[number]

    def session_transport(self, process_set: ProcessSet) -> Transport | None:
        """The transport of a training session; None: the session makes one of all workers."""
        if process_set.process_set_id == 0 and not self.simulated:
            return None
        self._sessions += 1
        return LaneTransport(self.lane(process_set), f"session {self._sessions}")

    def add(self, process_set: ProcessSet) -> None:
        """Raises ValueError for ranks that the job does not have, or that another set has."""
        _check_new([process_set], [known.ranks for known in self._sets.values()], self.size)
        included = self.rank in process_set.ranks
        transport = self._make(process_set.ranks if included else [self.rank])
        number = next(number for number in count(1) if number not in self._sets)  # the same on every rank
        process_set.process_set_id, self._sets[number] = number, process_set
        if included:
            self._lanes[number] = self._lane(transport, process_set.ranks)
        else:
            transport.close()

    def remove(self, process_set: ProcessSet) -> bool:
        number = process_set.process_set_id
        if not number or number not in self._sets:
            return False
        for exchange in list(self.exchanges):
            if exchange.process_set is process_set:
                exchange.restart()
        self.barrier()  # or a rank would close connections that others still read
        del self._sets[number]
        process_set.process_set_id = None
        if number in self._lanes:
            self._lanes.pop(number).close()
        return True

    def submit(self, call: CollectiveCall, name: str | None, process_set: ProcessSet) -> int:
        if isinstance(op := getattr(call, "op", None), ReductionOp) and op is ReductionOp.ADASUM:
            raise NotImplementedError(
                "Adasum is not supported. Use op=hvd.Average, with the learning rate of one worker; recipes such as "
                "DiLoCo(period=50) also combine workers that train independently."
            )
        pending = self.lane(process_set).submit(call, name)
        self._next_handle += 1
        self._handles[self._next_handle] = pending
        return self._next_handle

    def poll(self, handle: int) -> bool:
        return handle not in self._handles or self._handles[handle].future.done()

    def synchronize(self, handle: int) -> Any:
        pending = self._handles.pop(handle, None)
        if pending is None:
            raise ValueError(
                f"handle {handle} is not known: it was synchronized before. Keep the result of synchronize."
            )
        with current_worker().waiting():
            return pending.future.result()

    def barrier(self, process_set: ProcessSet = global_process_set) -> None:
        self.synchronize(self.submit(BarrierCall(), None, process_set))

    def close(self) -> None:
        for exchange in list(self.exchanges):
            with suppress(PeerLost, HorovodInternalError):
                exchange.restart()
        for lane in self._lanes.values():
            lane.close()
        for process_set in self._sets.values():
            if process_set is not global_process_set:
                process_set.process_set_id = None
        if self.timeline is not None:
            self.timeline.close()


def _check_new(process_sets: Sequence[ProcessSet], known: Sequence[Sequence[int]], size: int) -> None:
    """Raises ValueError for ranks that are not those of a job of this size, and for duplicates, also of known sets."""
    taken = list(map(list, known))
    for each in process_sets:
        ranks = [*range(size)] if each._ranks is None else each._ranks
        if ranks in taken:
            raise ValueError(f"Attempted to add a duplicate process set: {each}")
        if not ranks or not 0 <= ranks[0] <= ranks[-1] < size:
            raise ValueError(f"{each} must have ranks from 0 to {size - 1}")
        taken.append(ranks)


_contexts: WeakKeyDictionary[WorkerScope, Context] = WeakKeyDictionary()


def place(context: Context) -> None:
    """Use `context` for this simulated worker and ignore the environment."""
    _contexts[current_worker()] = context


def context() -> Context:
    """This worker's context. Raises ValueError before `init`."""
    found = _contexts.get(current_worker())
    if found is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return found


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the job that the environment describes; alone, a job of one. Later calls do nothing.

    Args:
        comm: Not supported; use process_sets.
        process_sets: Sets to add at once; "dynamic" and None: none.

    Raises:
        ValueError: for duplicate process sets, and ranks that the job does not have. init may then be called again.
        AttachError: in an elastic run of Gossamer.
        gossamer.errors.ConnectError: where workers do not come.
    """
    if is_initialized():
        return
    if comm:
        raise ValueError("init(comm=...) is not supported. Write hvd.init(process_sets=[hvd.ProcessSet(ranks)]).")
    if is_elastic():
        raise AttachError(
            "Horovod's ranks are fixed while hvd.init() is in force, and workers of this run come and go. Write "
            "gossamer run --as-horovod --workers 4 --max-restarts 3: hvd.elastic.run continues from its last commit."
        )
    world = current_world()
    given = process_sets if isinstance(process_sets, list | tuple) else ()
    _check_new(given, [range(world.size)], world.size)
    events.emit(events.WithoutSession(trains=False))

    def make(ranks: Sequence[int]) -> Transport:
        return transport_for(world, resolve(None, world.size), None if len(ranks) == world.size else list(ranks))

    place(Context(world.rank, world.local_rank, world.size, make))
    for process_set in given:
        context().add(process_set)


def shutdown() -> None:
    """Leave: open handles fail, and `init` may be called again, on every rank."""
    if is_initialized():
        _contexts.pop(current_worker()).close()


def is_initialized() -> bool:
    """Whether `init` was called."""
    return current_worker() in _contexts


def rank() -> int:
    """This worker's number in the job, from 0."""
    return context().rank


def size() -> int:
    """The number of workers."""
    return context().size


def local_rank() -> int:
    """This worker's number on its machine."""
    return context().local_rank


def local_size() -> int:
    """The number of workers on this machine."""
    return context().local_size


def cross_rank() -> int:
    """The number of this worker's machine."""
    return context().cross_rank


def cross_size() -> int:
    """The number of machines."""
    return context().cross_size


def is_homogeneous() -> bool:
    """Whether all machines have equally many workers."""
    return size() == local_size() * cross_size()


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Add a set of ranks; every rank of the job calls it. Returns the set.

    Args:
        process_set: a ProcessSet, or a list of ranks.

    Raises:
        ValueError: for a set of the same ranks as another, or with ranks that the job does not have.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    context().add(added)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a set; every rank of the job calls it. False for a set that is not known, and for the global one.

    Optimizers of the set begin their recipe again when it is added again. Later sets may have its number.

    Args:
        process_set: a set that `add_process_set` returned.
    """
    return context().remove(process_set)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the set has called it.

    Args:
        process_set: the ranks of the call; all by default.
    """
    context().barrier(process_set)


def poll(handle: int) -> bool:
    """Whether an asynchronous call is done, so that `synchronize` returns at once.

    Args:
        handle: as an asynchronous call returned it.
    """
    return context().poll(handle)


def join_lane() -> Callable[[], int]:
    """Contribute zeros to the calls of other ranks from now on.

    Returns:
        A function that waits until all ranks have joined, and returns the rank that joined last.
    """
    joined = context().lane(global_process_set).join()

    def wait() -> int:
        with current_worker().waiting():
            return joined.result()

    return wait


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write the timeline of rank 0 to a file from now on.

    Args:
        file_path: file of trace events in JSON, which chrome://tracing and Perfetto open.
        mark_cycles: accepted for Horovod's signature.
    """
    here = context()
    if here.rank == 0:
        before, here.timeline = here.timeline, CallTimeline(file_path, mark_cycles)
        if before is not None:
            before.close()


def stop_timeline() -> None:
    """End the timeline's file."""
    before, context().timeline = context().timeline, None
    if before is not None:
        before.close()


def mpi_threads_supported() -> bool:
    """False: there is no MPI."""
    return False


def mpi_enabled() -> bool:
    """False: Gossamer's own connections are used."""
    return False


def mpi_built() -> bool:
    """False: Gossamer's own connections are used."""
    return False


def gloo_enabled() -> bool:
    """True: collective calls run on processors."""
    return True


def gloo_built() -> bool:
    """True: collective calls run on processors."""
    return True


def nccl_built() -> int:
    """0: tensors on GPUs pass through the memory of their machine."""
    return 0


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """False: tensors on GPUs pass through the memory of their machine."""
    return False


def rocm_built() -> bool:
    """False."""
    return False


def reduction(op: ReductionOp | None, average: bool | None) -> ReductionOp:
    """The operation that `op` and the former argument `average` name. Raises ValueError for both."""
    if op is not None:
        if average is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        if not isinstance(op, ReductionOp):
            raise ValueError(f"op must be hvd.Average, Sum, Min, Max or Product, got {op!r}")
        return op
    return ReductionOp.SUM if average is False else ReductionOp.AVERAGE


def internal_error(failure: PeerLost) -> HorovodInternalError:
    """A lost worker, as `elastic.run` expects it."""
    return HorovodInternalError(str(failure))


def _round_settings() -> RoundSettings:
    fusion = os.environ.get("HOROVOD_FUSION_THRESHOLD")
    return RoundSettings(
        fusion_bytes=RoundSettings.fusion_bytes if fusion is None else int(fusion),
        cycle_seconds=float(os.environ.get("HOROVOD_CYCLE_TIME", "0")) / 1e3,
    )


def _timeline_of_environment(rank: int) -> CallTimeline | None:
    path = os.environ.get("HOROVOD_TIMELINE", "")
    if rank or not path or path == "DYNAMIC":
        return None
    return CallTimeline(path, os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") == "1")
