"""A step is short enough to be read: how many functions and files it passes through, with a ceiling for each recipe."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support.paths import ROOT
from support.virtual_workers import Worker, cluster

import gossamer
from gossamer.comm.runtime.worker_scope import WorkerScope, enter

SOURCE = f"{Path(gossamer.__file__).parent}/"
# The transport of virtual workers: the thread that comes last computes the answers of all of them.
LEFT_OUT = ("base/op_semantics.py", "comm/simulated.py")


@dataclass
class Walk:
    """Calls of one worker's threads while `on`, without those of the simulated transport. Every function counts once,
    however often it is called."""

    threads: set[threading.Thread] = field(default_factory=set)
    names: tuple[str, ...] = ()  # of more threads that are this worker's
    on: bool = False
    calls: set[tuple[str, str]] = field(default_factory=set)  # (file, function)

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.on or event != "call" or not frame.f_code.co_filename.startswith(SOURCE):
            return
        thread = threading.current_thread()
        if thread in self.threads or thread.name in self.names:
            file = frame.f_code.co_filename.removeprefix(SOURCE)
            if file not in LEFT_OUT:
                self.calls.add((file, frame.f_code.co_qualname))

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


SERVER_THREADS = ("gossamer worker 0", "gossamer script of worker 0")

# Recipe: (step, functions, files). Lower a ceiling where the step becomes shorter. A few calls depend on which thread
# waits for the other one. A ceiling is the largest count of many runs; functions have one more.
CEILINGS = {
    "Dense()": (4, 118, 24),
    "TopK(0.05)": (4, 191, 34),
    "DiLoCo(period=4)": (7, 186, 41),
    "ParameterServer(mode='sync')": (4, 240, 53),
}


@pytest.fixture(scope="module")
def walks() -> dict[str, Walk]:
    """By recipe, from a process in which no other test has left hooks or events."""
    code = (
        "import json\n"
        "from scenarios.test_step_walk import CEILINGS, SERVER_THREADS, step_walk\n"
        "walks = {recipe: step_walk(recipe, step, SERVER_THREADS) for recipe, (step, *_) in CEILINGS.items()}\n"
        "print(json.dumps({recipe: sorted(walk.calls) for recipe, walk in walks.items()}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "tests", check=True, capture_output=True, text=True, timeout=200
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return {recipe: Walk(calls={(file, function) for file, function in calls}) for recipe, calls in found.items()}


@pytest.mark.parametrize("recipe", CEILINGS)
def test_step_passes_through_no_more_functions_and_files_than_the_ceiling(recipe: str, walks: dict[str, Walk]) -> None:
    _, functions, files = CEILINGS[recipe]
    walk = walks[recipe]
    assert walk.functions <= functions, walk
    assert walk.files <= files, walk
    assert walk.functions > functions // 2, "this test sees only a part of the step"
