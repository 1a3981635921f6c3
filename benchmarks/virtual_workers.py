"""Simulated training of several workers in threads: a model and a real session each, over a transport that counts."""

import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypedDict

import torch
from benchmarks.tasks import Task
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.ops import CollectiveOp
from gossamer.base.transport import Transport
from gossamer.comm.simulated import SimulatedGroup, SimulatedTransport
from gossamer.errors import NonFiniteError, PeerLost
from gossamer.train.session.session import Session
from gossamer.train.world_state import WorldState

APART = "apart"  # in the place of a recipe: nobody talks
POINTS = 10  # of a curve
PATIENCE_SECONDS = 86400.0  # a busy machine is no reason to give up, nor a paused process
ECHOES = PeerLost, threading.BrokenBarrierError  # of another worker's failure


class Run(TypedDict):
    """curve: (steps made, bytes sent per worker until then, held-out loss of what is merged).

    held_out: of what is merged, and where nobody talks on average over the workers; alone: of the first worker's own
    model. A loss is None where the training diverged.
    """

    recipe: str
    resolved: str
    learning_rate: float
    seed: int
    steps: int
    workers: int
    seconds: float
    bytes_sent: float
    curve: list[tuple[int, float, float | None]]
    held_out: float | None
    alone: float | None


class Counting:
    """A transport that adds up the payload bytes of all collective operations, also of its parts; texts and the first
    broadcast do not count."""

    def __init__(self, inner: SimulatedTransport) -> None:
        self._inner, self.rank, self.world = inner, inner.rank, inner.world
        self.links = inner.links
        self._answered, self._parts = 0.0, list[Counting]()

    @property
    def bytes_sent(self) -> float:
        return self._answered + sum(part.bytes_sent for part in self._parts)

    def answer(self, op: CollectiveOp) -> Any:
        self._answered += op.bytes_sent(self.world, self.rank)
        return self._inner.answer(op)

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        self._answered += op.bytes_sent(self.world, self.rank)
        return self._inner.begin(op)

    def make_progress(self) -> bool:
        return self._inner.make_progress()

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        self._inner.broadcast_(tensors, source)

    def all_gather_text(self, text: str) -> list[str]:
        return self._inner.all_gather_text(text)

    def part(self, size: int) -> Transport:
        self._parts.append(Counting(self._inner.part(size)))
        return self._parts[-1]

    def close(self) -> None:
        self._inner.close()


_building = threading.Lock()  # torch's global generator is shared by the threads


@dataclass
class Worker:
    """One thread's part. losses: (steps made, bytes sent until then, held-out loss), of those who look. until: steps
    after which the training is left; 0: after all."""

    task: Task
    exam: tuple[Tensor, ...]
    recipe: str
    learning_rate: float
    seed: int
    steps: int
    transport: Counting
    finished: threading.Barrier
    losses: list[tuple[int, float, float | None]] = field(default_factory=list)
    own: float | None = None
    until: int = 0
    merging_bytes: float = 0.0  # sent to look at what is merged, and no part of training

    def work(self) -> None:
        torch.set_num_threads(1)  # counted in each thread
        with _building:
            torch.manual_seed(self.seed)
            model = self.task.build()
        optimizer = self.task.optimizer(model.parameters())
        if self.recipe == APART:
            self._train(model, optimizer, None)
        else:
            self._talk(model, optimizer)

    def _talk(self, model: nn.Module, optimizer: Optimizer) -> None:
        """The first to close its session ends the group, so all do that when all are done."""
        recipe = resolve(self.recipe, self.transport.world)
        rank, device = self.transport.rank, torch.device("cpu")
        world = WorldState(rank=rank, size=self.transport.world, local_rank=rank, device=device)
        session = Session(model, optimizer, recipe, self.transport, world=world, seed=self.seed)
        try:
            self._train(model, optimizer, session)
            self.finished.wait(PATIENCE_SECONDS)
        finally:
            session.close()

    def _train(self, model: nn.Module, optimizer: Optimizer, session: Session | None) -> None:
        every = self.steps if session is None else max(1, self.steps // POINTS)
        batches = self.task.batches(self.transport.world, self.seed)
        for step in range(1, (self.until or self.steps) + 1):
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * self.task.pace((step - 1) / self.steps)
            self.task.loss(model, *next(batches)[self.transport.rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % every == 0 or step == self.steps:
                self._look(step, model, session)
        if session is not None:
            settle(session)
        self.own = self._loss(model)

    def _look(self, step: int, model: nn.Module, session: Session | None) -> None:
        if session is None:
            self.losses.append((step, 0.0, self._loss(model)))
            return
        settle(session)
        sent = self.transport.bytes_sent - self.merging_bytes
        with session.averaged_parameters(model):  # all come, since with some recipes that is a mean over workers
            if self.transport.rank == 0:
                self.losses.append((step, sent, self._loss(model)))
        self.merging_bytes = self.transport.bytes_sent - sent

    @torch.no_grad()
    def _loss(self, model: nn.Module) -> float | None:
        model.eval()
        loss = float(self.task.loss(model, *self.exam))
        model.train()
        return loss if math.isfinite(loss) else None


def settle(session: Session) -> None:
    """Wait for rounds in flight, so that their bytes are counted; they land when they would have."""
    session.state_dict()


@contextmanager
def quiet() -> Iterator[None]:
    logger = logging.getLogger("gossamer")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def train(
    task: Task,
    exam: tuple[Tensor, ...],
    recipe: str,
    learning_rate: float,
    seed: int,
    steps: int,
    workers: int,
    until: int = 0,
) -> Run:
    """until: steps of the whole schedule after which the training is left, a multiple of steps // POINTS; 0: all."""
    began = time.perf_counter()
    task.samples()  # once, not in every thread
    group = SimulatedGroup(workers, PATIENCE_SECONDS)
    finished = threading.Barrier(workers)
    team = [
        Worker(task, exam, recipe, learning_rate, seed, steps, Counting(transport), finished, until=until)
        for transport in group.transports
    ]
    with quiet(), ThreadPoolExecutor(workers) as pool:
        ends = [future.exception() for future in [pool.submit(partial(work_in, each, group)) for each in team]]
    failures = [failure for failure in ends if failure is not None]
    real = [failure for failure in failures if not isinstance(failure, ECHOES)] or failures
    if real and not isinstance(real[0], NonFiniteError):
        raise real[0]
    return {
        "recipe": recipe,
        "resolved": APART if recipe == APART else repr(resolve(recipe, workers)),
        "learning_rate": learning_rate,
        "seed": seed,
        "steps": steps,
        "workers": workers,
        "seconds": time.perf_counter() - began,
        "bytes_sent": statistics.fmean(each.transport.bytes_sent - each.merging_bytes for each in team),
        "curve": _mean_curve([each.losses for each in team if each.losses]),
        "held_out": None if failures else _mean([each.losses[-1][2] for each in team if each.losses]),
        "alone": team[0].own,
    }


def work_in(worker: Worker, group: SimulatedGroup) -> None:
    try:
        worker.work()
    except BaseException:
        worker.finished.abort()
        group.leave()
        raise


def _mean_curve(curves: Sequence[list[tuple[int, float, float | None]]]) -> list[tuple[int, float, float | None]]:
    return [
        (points[0][0], points[0][1], _mean([loss for _, _, loss in points])) for points in zip(*curves, strict=False)
    ]


def _mean(losses: Sequence[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return statistics.fmean(known) if known and len(known) == len(losses) else None
