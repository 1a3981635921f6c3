"""Exchange timing: a real synchronizer runs over a replay transport, so that only its work takes time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median, stdev
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from gossamer.algorithms.compressors import Codec, Compressor, PerWorker
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.recipes.wrapping import replace_tables
from gossamer.algorithms.strategies import ALIGN, AveragingStage, GossipStage, GradientStage, Stage
from gossamer.algorithms.topologies import Ring
from gossamer.base.aggregation import STEADY
from gossamer.comm.echo_transport import ReplayTransport, ScriptSeconds, TimedCompressor
from gossamer.comm.runtime.comm_thread import CommThread, Work
from gossamer.comm.runtime.transaction import Transaction
from gossamer.comm.runtime.worker_scope import current_worker
from gossamer.train.engine.bucket import Bucket
from gossamer.train.engine.frozen_parameters import FrozenParameters
from gossamer.train.engine.loop import LoopState, StepContext
from gossamer.train.engine.parameter_check import ParameterCheck
from gossamer.train.engine.weight_copies import WeightCopies
from gossamer.train.synchronizers.base import Synchronizer
from gossamer.train.synchronizers.stages import Fragments, StageSequence

EXCHANGES = 4  # the first is not counted

Gradients = Mapping[str, Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class BucketTiming:
    """Seconds of one bucket in one exchange."""

    computing: Sequence[float]  # communication thread: before the first operation, between them, after the last
    engine: Sequence[float]  # within each operation
    offering: float = 0.0  # training thread, before the communication thread begins
    landing: float = 0.0  # training thread, after parameters have been averaged


def time_stage(
    stage: Stage, fragments: Fragments, compressor: Compressor, workers: int, fresh: Gradients
) -> list[dict[str, Any]]:
    """Medians for each bucket of a stage, named as in BucketProfile.

    fresh: content to send by name: gradients, or parameter differences. Parameters do not change.
    """
    with stage_timer(stage, fragments, compressor, workers, fresh) as timer:
        found = [timer.exchange(number) for number in range(EXCHANGES)][1:]
    return [_medians(same) for same in zip(*found, strict=True)]


def _medians(found: Sequence[BucketTiming]) -> dict[str, Any]:
    return {
        "computing_seconds": np.median([each.computing for each in found], axis=0).tolist(),
        "engine_seconds": np.median([each.engine for each in found], axis=0).tolist(),
        "offering_seconds": median(each.offering for each in found),
        "landing_seconds": median(each.landing for each in found),
        "spread_seconds": stdev(sum(each.computing) + sum(each.engine) for each in found),
    }


def most_common(term: PerWorker, workers: int) -> Codec:
    """The codec of most workers."""
    return max(term.senders(workers), key=lambda sender: len(sender[1]))[0]


@contextmanager
def stage_timer(
    stage: Stage, fragments: Fragments, compressor: Compressor, workers: int, fresh: Gradients
) -> Iterator[StageTimer]:
    """A timer with a synchronizer. At the end it is closed, and parameters and gradients are restored."""
    compressor = replace_tables(compressor, lambda term: most_common(term, workers))  # answers repeat one message
    parameters = {name: each for part in fragments for bucket in part for name, each in bucket.parameters.items()}
    kept = {name: each.detach().clone() for name, each in parameters.items() if stage.local_parameters}
    gradients = {name: each.grad for name, each in parameters.items()}
    alone = _timed_alone(stage)
    gossip = isinstance(stage, GossipStage)
    transport = ReplayTransport(2 if gossip else workers)  # gossip: with one neighbor
    threads, timed = _InlineCommThread(transport), TimedCompressor(compressor, transport)
    recipe = Recipe(compressor=compressor if gossip else cast(Compressor, timed), topology=Ring())
    moments = isinstance(stage, AveragingStage) and (stage.strategy.moments.named or stage.strategy.on_merge == ALIGN)
    optimizer = (torch.optim.Adam if moments else torch.optim.SGD)(parameters.values())
    sequence = StageSequence(recipe, optimizer, transport, cast(CommThread, threads), _loop(), seed=0)
    sequence.now = alone
    with torch.no_grad():
        synchronizer = sequence.make(parameters, fragments)
        try:
            yield StageTimer(alone, synchronizer, fragments, parameters, fresh, timed, threads)
        finally:
            synchronizer.close()
            for name, parameter in parameters.items():
                parameter.grad = gradients[name]
                if name in kept:
                    parameter.copy_(kept[name])


def _timed_alone(stage: Stage) -> Stage:
    """The stage from its beginning, without sites, and with as many passes per step for any number of workers."""
    match stage:
        case AveragingStage(strategy=strategy):
            return AveragingStage(0, strategy)
        case GradientStage(accumulate=accumulate, delay=delay):
            return GradientStage(0, accumulate, delay)
        case _:
            return replace(stage, start=0)


def _loop() -> LoopState:
    """A training loop without buffers. It has a loss scale, so that gradients are not checked for infinities."""

    def ignore(*_: Any) -> None:
        """Do nothing."""

    unchecked = ParameterCheck(nn.Module(), {}, "off", rank=0)
    return LoopState(
        now=lambda: StepContext(scale=1.0),
        scale=lambda: 1.0,
        buffers=lambda: (),
        averaged=dict,
        frozen=FrozenParameters(nn.Module()),
        copies=WeightCopies(),
        warn=ignore,
        ended=ignore,
        judged=ignore,
        check=unchecked,
    )


class _InlineCommThread:
    """A communication thread that runs each job immediately, in the submitting thread."""

    def __init__(self, transport: ReplayTransport) -> None:
        self._transport = transport
        self.is_fixed, self.is_awaited = True, False
        self.jobs: list[tuple[float, float]] = []  # (begin, end) of each

    def transaction(self, **_: Any) -> Transaction:
        return Transaction(None)

    def as_transaction(self, job: Callable[[], T], **_: Any) -> Callable[[], T]:
        return job

    def exchange(self, job: Callable[[], T], **_: Any) -> Work[T]:
        return self.submit(job)

    def members(self, world: int) -> Sequence[int]:
        return range(world)

    def submit(self, job: Callable[[], T], on_failure: Callable[[BaseException], None] | None = None) -> Work[T]:
        began, work = time.perf_counter(), Work(job, None, on_failure, current_worker())
        self._transport.pause()
        work.run()
        self._transport.pause()
        self.jobs.append((began, time.perf_counter()))
        return work

    def sibling(self) -> _InlineCommThread:
        return self

    def close(self) -> None:
        """There is no thread to end."""


def _part(script: ScriptSeconds, share: float) -> BucketTiming:
    return BucketTiming([share * each for each in script.computing], [share * each for each in script.engine])


@dataclass(frozen=True)
class StageTimer:
    """Runs exchanges of a real synchronizer on request."""

    stage: Stage
    synchronizer: Synchronizer
    fragments: Fragments
    parameters: Mapping[str, Parameter]
    fresh: Gradients
    compressor: TimedCompressor
    threads: _InlineCommThread

    def exchange(self, number: int) -> list[BucketTiming]:
        """The `number`-th exchange of each fragment after the compressors' warm-up; by bucket."""
        return [timed for place, buckets in enumerate(self.fragments) for timed in self._round(number, place, buckets)]

    def _round(self, number: int, fragment: int, buckets: Sequence[Bucket]) -> list[BucketTiming]:
        self._seek((STEADY + number) * self.stage.schedule.fragments + fragment)
        for _ in range(self.stage.passes_per_step - 1):
            self._pass()
        self.compressor.scripts.clear()
        offering, landing = self._pass()
        whole = sum(bucket.layout.numel for bucket in buckets) or 1  # parameters may be empty
        shares = [bucket.layout.numel / whole for bucket in buckets]
        if isinstance(self.stage, GossipStage):  # one operation for all buckets
            script = self.compressor.transport.scripts[-1]
            return [_part(script, share) for share in shares]
        offers, lands = self.stage.scheduled, self.stage.local_parameters
        return [
            BucketTiming(script.computing, script.engine, share * offering * offers, share * landing * lands)
            for script, share in zip(self.compressor.scripts, shares, strict=True)
        ]

    def _seek(self, number: int) -> None:
        """Advance to the last step before a round."""
        step = self.stage.schedule.sync_round(number).launch - 1
        if isinstance(self.stage, GossipStage) or not self.stage.scheduled:
            self.synchronizer.begin_at(step)
            return
        there = {"step": step, "turn": number, "reference": 1.0, "flights": []}
        self.synchronizer.resume({**self.synchronizer.progress(), **there}, self.synchronizer.remembered())

    def _pass(self) -> tuple[float, float]:
        """One backward pass and optimizer step. Return the seconds before and after the communication thread's jobs."""
        for name, parameter in self.parameters.items():
            parameter.grad = self.fresh[name]
            if self.stage.local_parameters:
                parameter.sub_(self.fresh[name])
        self.threads.jobs.clear()
        began = time.perf_counter()
        self.synchronizer.before_step(closure=False)
        self.synchronizer.after_step()
        self.synchronizer.flush()
        ended, jobs = time.perf_counter(), self.threads.jobs or [(began, began)]
        return jobs[0][0] - began, ended - jobs[-1][1]
