"""Workers of gossamer.horovod in this process: one thread each, on simulated transports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from laws.laws import in_threads

from gossamer.base.transport import Transport
from gossamer.comm.runtime.worker_scope import WorkerScope, enter
from gossamer.comm.simulated import SimulatedGroup
from gossamer.horovod import basics


class SimulatedJob:
    """Hands out transports of groups of ranks, as every rank asks for them in the same order."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._groups: dict[tuple[int, tuple[int, ...]], SimulatedGroup] = {}
        self._asking = threading.Lock()

    def of(self, rank: int) -> Callable[[Sequence[int]], Transport]:
        asked = iter(range(1000))

        def make(ranks: Sequence[int]) -> Transport:
            with self._asking:
                group = self._groups.setdefault((next(asked), tuple(ranks)), SimulatedGroup(len(ranks)))
            return group.transports[list(ranks).index(rank)]

        return make

    def leave(self) -> None:
        """Break all groups, so that no rank waits for one that failed."""
        with self._asking:
            for group in self._groups.values():
                group.leave()


_here = threading.local()


def initialize_again() -> None:
    """Shut down and initialize this rank, as every rank does."""
    basics.shutdown()
    _here.initialize()


def horovod(work: Callable[[int], Any], world: int = 2) -> list[Any]:
    """The results of work(rank) by rank, each in a thread that is initialized; raises the first failure."""
    job, failures = SimulatedJob(world), list[BaseException]()

    def run(rank: int) -> Any:
        enter(WorkerScope())
        make = job.of(rank)
        _here.initialize = lambda: basics.place(basics.Context(rank, rank, world, make, simulated=True))
        _here.initialize()
        try:
            result = work(rank)
            basics.barrier()
        except BaseException as failure:
            failures.append(failure)
            job.leave()
            raise failures[0] from None  # not that of a rank that waited for this one
        finally:
            basics.shutdown()
        return result

    return in_threads(run, world)
