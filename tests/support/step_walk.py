"""Step walk: which functions and files of Gossamer one training step of one worker passes through."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from support.virtual_workers import Worker, cluster

import gossamer
from gossamer.comm.runtime.worker_scope import WorkerScope, enter

SOURCE = f"{Path(gossamer.__file__).parent}/"


@dataclass
class Walk:
    """Calls of one worker's threads while `on`. Every function counts once, however often it is called."""

    threads: set[threading.Thread] = field(default_factory=set)
    names: tuple[str, ...] = ()  # of more threads that are this worker's
    on: bool = False
    calls: set[tuple[str, str]] = field(default_factory=set)  # (file, function)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.on or event != "call" or not frame.f_code.co_filename.startswith(SOURCE):
            return
        thread = threading.current_thread()
        if thread in self.threads or thread.name in self.names:
            self.calls.add((frame.f_code.co_filename.removeprefix(SOURCE), frame.f_code.co_qualname))

    @property
    def functions(self) -> int:
        return len(self.calls)

    @property
    def files(self) -> int:
        return len({file for file, _ in self.calls})

    def __str__(self) -> str:
        return "\n".join(f"{file}: {function}" for file, function in sorted(self.calls))


@contextmanager
def profiled(walk: Walk) -> Iterator[None]:
    """Within the block new threads report their calls to `walk`."""
    threading.setprofile(walk)
    try:
        yield
    finally:
        threading.setprofile(None)


def step_walk(recipe: str, at: int, names: tuple[str, ...] = ()) -> Walk:
    """The walk of rank 0 in step `at` of a one-parameter model, in one of two virtual workers."""
    walk = Walk(names=names)

    def train(worker: Worker) -> None:
        enter(WorkerScope())  # as in a process of its own: hooks of the other worker's session are not called
        first = worker.rank == 0
        model = torch.nn.Linear(64, 64, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session = worker.attach(model, optimizer, recipe)
        if first:
            walk.threads |= {threading.current_thread(), session._group.comm_thread._thread}
        with session.epoch():
            for step in range(at + 2):
                walk.on = step == at if first else walk.on
                (model(torch.ones(8, 64)) - 1).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                walk.on = False if first else walk.on
        session.close()

    with profiled(walk):
        cluster(train, 2)
    return walk
