"""Virtual world: a worker's place in a simulated job, which brings its groups along."""

from __future__ import annotations

import threading
from itertools import count

import torch

from gossamer.base.transport import Transport
from gossamer.comm.runtime.worker_scope import current_worker
from gossamer.comm.simulated import SimulatedGroup, SimulatedTransport
from gossamer.train.world import World


class VirtualGroups:
    """The groups of one simulated job, in the order in which its workers ask for them."""

    def __init__(self, workers: int) -> None:
        self.workers, self._broken = workers, False
        self._groups: list[SimulatedGroup] = []
        self._closed: set[int] = set()  # ranks
        self._lock = threading.Lock()

    def group(self, number: int) -> SimulatedGroup:
        with self._lock:
            while len(self._groups) <= number:
                self._groups.append(self._fresh())
            return self._groups[number]

    def _fresh(self) -> SimulatedGroup:
        group = SimulatedGroup(self.workers, threading.TIMEOUT_MAX)  # a job may be paused for long
        for rank in self._closed:
            group.close(rank)
        if self._broken:
            group.leave()
        return group

    def close(self, rank: int) -> None:
        """This rank's script is over: whoever waits for it, or will, is told."""
        with self._lock:
            self._closed.add(rank)
            for group in self._groups:
                group.close(rank)

    def leave(self) -> None:
        """Break all of them: nobody waits any more."""
        with self._lock:
            self._broken = True
            for group in self._groups:
                group.leave()


class VirtualTransport(SimulatedTransport):
    """One worker's end of a group, where texts take time, too."""

    def all_gather_text(self, text: str) -> list[str]:
        heard = super().all_gather_text(text)
        current_worker().exchanged()
        return heard


class VirtualWorld(World):
    """One worker's world. On the processor: gradients of a GPU are complete in threads that all workers share."""

    def __init__(self, rank: int, groups: VirtualGroups) -> None:
        super().__init__(rank=rank, size=groups.workers, local_rank=rank, device=torch.device("cpu"))
        self._groups, self._numbers = groups, count()

    def own_transport(self) -> Transport:
        """This worker's end of the job's next group."""
        return VirtualTransport(self._groups.group(next(self._numbers)), self.rank)
