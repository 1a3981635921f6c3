"""Simulated training of several workers with one model: real aggregations in lock step, in one thread."""

import math
import time
from collections.abc import Generator
from typing import Any, TypedDict

import torch
from benchmarks.tasks import Task
from torch import Tensor

from gossamer.algorithms.compressors import Compressor
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.aggregation import NO_MOMENTS, AggregationContext, AggregationResult
from gossamer.base.ops import CollectiveOp
from gossamer.base.runner import simulate
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import NotFinite
from gossamer.train.engine.bucket import Bucket
from gossamer.train.moments.take_over import take_over

POINTS = 24  # of a curve


class Run(TypedDict):
    """curve: (steps made, bytes sent per worker until then, training loss). A loss is None where it is no number."""

    task: str
    compressor: str
    resolved: str
    seed: int
    steps: int
    workers: int
    seconds: float
    curve: list[tuple[int, float, float | None]]
    held_out: float | None


class Workers:
    """`world` workers who own one model: their gradients are computed one after another, and averaged as a group's."""

    def __init__(self, task: Task, text: str, seed: int, world: int) -> None:
        torch.manual_seed(seed)
        self.task, self.world, self.seed, self.step = task, world, seed, 0
        self.model = task.build()
        self.compressor: Compressor = resolve(text, world=world).compressor
        self.optimizer = task.optimizer(self.model.parameters())
        parameters = dict(self.model.named_parameters())
        at = [AggregationContext(seed=seed, rank=rank, world=world) for rank in range(world)]
        self.buckets = [Bucket(parameters, self.compressor, here) for here in at]
        transport = SimulatedGroup(world).transports[0]  # over which nothing is sent
        self.momentum = take_over(self.optimizer, self.compressor, parameters, transport, None)
        self.bytes_sent = 0.0

    def train(self, batches: list[tuple[Tensor, ...]]) -> None:
        """One step. Raises NotFinite where the training diverges."""
        names = set(self.buckets[0].layout.names)
        for bucket, samples in zip(self.buckets, batches, strict=True):
            bucket.flat.zero_()
            bucket.point(names)
            self.task.loss(self.model, *samples).backward()
        moments = NO_MOMENTS if self.momentum is None else self.momentum.now()
        scripts = []
        for rank, bucket in enumerate(self.buckets):
            at = AggregationContext(step=self.step, seed=self.seed, rank=rank, world=self.world, **moments._asdict())
            scripts.append(self._counted(bucket, at))
        staged: list[AggregationResult] = simulate(scripts)
        if not all(each.finite for each in staged):
            raise NotFinite("the group agreed on a number that is not finite")
        for bucket, each in zip(reversed(self.buckets), reversed(staged), strict=True):
            bucket.commit(each.next_state, names, 1.0)  # the first worker's gradients stay with the model
        self.step += 1
        if self.momentum is not None:
            self.momentum.before(self.step)
        self.optimizer.step()
        if self.momentum is not None:
            self.momentum.after()

    def _counted(self, bucket: Bucket, at: AggregationContext) -> Generator[CollectiveOp, Any, AggregationResult]:
        """A worker's script; what it sends is counted."""
        script, answer = self.compressor.aggregate(bucket.packed, bucket.state, at, bucket.flat), None
        while True:
            try:
                op = script.send(answer)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            self.bytes_sent += op.bytes_sent(at.world, at.rank) / at.world
            answer = yield op

    def loss(self) -> float | None:
        """Over the samples to learn from that are followed."""
        return self._loss(self.task.samples()[1])

    def held_out(self) -> float | None:
        return self._loss(self.task.samples()[2])

    @torch.no_grad()
    def _loss(self, samples: tuple[Tensor, ...]) -> float | None:
        self.model.eval()
        found = float(self.task.loss(self.model, *samples))
        self.model.train()
        return found if math.isfinite(found) else None


def train(name: str, task: Task, text: str, seed: int, steps: int, world: int, every: int) -> Run:
    """Train; losses are taken before the first, after each `every`-th and after the last step."""
    began = time.perf_counter()
    workers = Workers(task, text, seed, world)
    batches = task.batches(world, seed)
    curve = [(0, 0.0, workers.loss())]
    for step in range(1, steps + 1):
        try:
            workers.train(next(batches))
        except NotFinite:
            curve.append((step, workers.bytes_sent, None))
            break
        if step % every == 0 or step == steps:
            curve.append((step, workers.bytes_sent, workers.loss()))
    return {
        "task": name,
        "compressor": text,
        "resolved": repr(workers.compressor),
        "seed": seed,
        "steps": steps,
        "workers": world,
        "seconds": time.perf_counter() - began,
        "curve": curve,
        "held_out": None if curve[-1][2] is None else workers.held_out(),
    }
