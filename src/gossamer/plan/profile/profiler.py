"""Profiler: runs one copy of a user's script, and times its steps and the compression of its gradients.

`python -m gossamer.plan.profile.profiler DIRECTORY COPY COPIES WORKERS BATCHES SCRIPT ARGS...` writes its numbers to
DIRECTORY. The first copy also takes gradient statistics of BATCHES batches after the timed ones.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gossamer.algorithms.compressors import Dense
from gossamer.algorithms.strategies import GradientStage, Stage
from gossamer.base import system
from gossamer.base.aggregation import STEADY, AggregationContext
from gossamer.base.layout import FlatTensors, dtype_name
from gossamer.base.torch_hooks import uncompiled
from gossamer.comm.runtime.open_sessions import open_sessions
from gossamer.comm.simulated import SimulatedGroup
from gossamer.plan.estimate.workload_profile import ENOUGH_STEPS, BucketProfile, OtherLoad, WorkloadProfile
from gossamer.plan.profile.exchange_timer import Gradients, time_stage
from gossamer.plan.profile.gradient_statistics import GradientObserver
from gossamer.plan.profile.load_meter import LoadMeter
from gossamer.plan.profile.user_script import run_as_main
from gossamer.train.engine.bucket import Bucket, assign_buckets
from gossamer.train.engine.parameter_views import trainable
from gossamer.train.session.lifecycle_events import begun
from gossamer.train.session.session import Session
from gossamer.train.synchronizers.stages import Fragments, bucket_fragments

AT_ONCE = GradientStage(0)
WARM_UP_STEPS = 3
SETTLING_STEPS, SETTLING_SECONDS = 50, 10.0  # before gradients are observed: the first ones are not typical
MEETING, WARM, TIMED, CODECS = STAGES = ("meeting", "warm", "timed", "codecs")  # stages of every copy, in this order
POLL_SECONDS = 0.001


def results(directory: Path, copies: int) -> list[Path]:
    return [directory / f"measured-{copy}.json" for copy in range(copies)]


def statistics_file(directory: Path) -> Path:
    return directory / "gradients.json"


# -- one copy ----------------------------------------------------------------------------------------------------------


class _Done(BaseException):
    """Ends a script after profiling. Not an Exception, so that the script's handlers do not catch it."""


@dataclass(frozen=True)
class _Barrier:
    """A barrier between copies, made of files. A waiting copy continues training, so that all stay busy."""

    directory: Path
    copy: int
    copies: int
    parent: int = field(default_factory=os.getppid)  # the process that reads the profile

    def arrive(self, *stages: str) -> None:
        for stage in stages:
            (self.directory / f"{stage}-{self.copy}").touch()

    def meet(self) -> None:
        """Wait for the others before any step counts: otherwise a short script could end before another begins."""
        self.arrive(MEETING)
        while not self.all_at(MEETING):
            self.check_parent()
            time.sleep(POLL_SECONDS)

    def check_parent(self) -> None:
        """End this copy if the process that reads its profile has ended."""
        if os.getppid() != self.parent:
            raise _Done

    def all_at(self, stage: str) -> bool:
        return all((self.directory / f"{stage}-{copy}").exists() for copy in range(self.copies))


@dataclass
class _StepMoments:
    """Times of one step."""

    begin: float
    ready: list[float]  # time at which each bucket's gradients were complete
    backward: float = 0.0  # end of the backward pass
    end: float = 0.0


@dataclass
class _StepProfiler:
    """Observes a session's steps from outside, and ends the script after enough of them."""

    barrier: _Barrier
    workers: int
    batches: int = 0  # to observe after the timed steps
    observer: GradientObserver | None = None  # after the timed steps
    settling_until: float = 0.0  # latest time
    session: Session | None = None  # the first one with a step
    stage: Stage = AT_ONCE  # steady stage of its recipe
    fragments: Fragments = ()  # of that stage
    site: Sequence[Bucket] = ()  # of gradients averaged within a site; empty without sites
    buckets: Sequence[Bucket] = ()  # observed: the site's, all fragments', or of gradients that are not sent
    steps: int = 0  # so far
    kept: list[_StepMoments] = field(default_factory=list)  # after the warm-up of all copies
    early: list[_StepMoments] = field(default_factory=list)  # during the warm-up
    now: _StepMoments | None = None  # of the current step
    meter: LoadMeter = field(default_factory=lambda: LoadMeter(os.getppid()))
    load: OtherLoad = field(default_factory=OtherLoad)  # during the kept steps

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        session = next(
            (each for each in open_sessions() if isinstance(each, Session) and each.optimizer is optimizer), None
        )
        if session is None:
            return
        self.barrier.check_parent()
        if self.observer is not None:
            self._observe(self.observer)
            return
        if self.session is None:
            self._watch(session)
            self.barrier.meet()
        _synchronize()
        moment = time.perf_counter()
        self._count(moment)
        if len(self.kept) >= ENOUGH_STEPS:
            self.barrier.arrive(TIMED)
            if self.barrier.all_at(TIMED):
                self._finish(session)
                self.observer, self.settling_until = GradientObserver(), time.perf_counter() + SETTLING_SECONDS
                self._observe(self.observer)
                return
        self.now = _StepMoments(time.perf_counter(), [0.0] * len(self.buckets))

    def _observe(self, observer: GradientObserver) -> None:
        """Let training settle, observe gradients, and end the script. Only the first copy does so."""
        self.steps += 1
        if self.barrier.copy or observer.seen_batches >= self.batches:
            raise _Done
        if observer.seen_batches or self.steps > SETTLING_STEPS or time.perf_counter() > self.settling_until:
            observer.steps_before = observer.steps_before or self.steps - 1
            observer.observe(self._gradients())
        if observer.seen_batches >= self.batches:
            self._write_statistics(observer)
            raise _Done

    def _write_statistics(self, observer: GradientObserver) -> None:
        if not observer.batches:
            return
        text = json.dumps(observer.statistics().to_json(), allow_nan=False)
        statistics_file(self.barrier.directory).write_text(text, encoding="utf-8")

    def after_script(self) -> None:
        """The script has ended: use the steps that it made, if any could be timed."""
        if self.session is None:
            return
        if self.observer is None:
            self.kept = self.kept or self.early[min(WARM_UP_STEPS, len(self.early) // 2) :]
            if not self.kept:
                return
            self.barrier.arrive(*STAGES[: STAGES.index(CODECS)])
            self._finish(self.session)
        observer = self.observer or GradientObserver(steps_before=self.steps)
        if self.batches and self.barrier.copy == 0:
            if not observer.seen_batches:
                observer.observe(self._gradients())  # the last step's, if there is no other
            self._write_statistics(observer)

    def _watch(self, session: Session) -> None:
        self.session, self.stage = session, session.recipe.strategy.steady_stage
        parameters, at = trainable(session.model), AggregationContext(step=STEADY, world=self.workers)
        if self.stage.communicates:
            self.fragments = bucket_fragments(self.stage, parameters, session.recipe.compressor, at)
        self.buckets = [bucket for buckets in self.fragments for bucket in buckets]
        if self.stage.per_site is not None or not self.stage.communicates:
            self.buckets = [Bucket(part, Dense(), at) for part in assign_buckets(parameters)]
        if self.stage.per_site is not None:
            self.site = self.buckets
        for place, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters.values():
                parameter.register_post_accumulate_grad_hook(uncompiled(partial(self._ready, place)))

    def _ready(self, place: int, parameter: Tensor) -> None:
        if self.now is None:
            return
        if not any(self.now.ready):
            torch.autograd.Variable._execution_engine.queue_callback(uncompiled(self._backward_ended))
        self.now.ready[place] = time.perf_counter()

    def _backward_ended(self) -> None:
        if self.now is not None:
            self.now.backward = time.perf_counter()

    def _count(self, moment: float) -> None:
        if self.now is None:
            return
        self.steps += 1
        if self.steps >= WARM_UP_STEPS:
            self.barrier.arrive(WARM)
        if not self.now.backward or len(self.kept) >= ENOUGH_STEPS:
            return
        self.now.end = moment
        warm = self.steps > WARM_UP_STEPS and self.barrier.all_at(WARM)
        (self.kept if warm else self.early).append(self.now)
        if len(self.kept) == ENOUGH_STEPS:
            self.load = self.meter.stop()
        elif not self.kept:
            self.meter.start()

    def _finish(self, session: Session) -> None:
        """Time the codecs on this step's gradients, while the other copies do the same."""
        if len(self.kept) < ENOUGH_STEPS:
            self.load = self.meter.stop()
        fresh = self._gradients()
        measured = self._measured(session, fresh)
        self.barrier.arrive(CODECS)
        while not self.barrier.all_at(CODECS):
            self._buckets(session, fresh)
        path = results(self.barrier.directory, self.barrier.copies)[self.barrier.copy]
        path.write_text(json.dumps(measured.to_json()), encoding="utf-8")

    def _gradients(self) -> Gradients:
        """The gradients of this step, or random numbers if the loop has cleared all of them."""
        found = {name: parameter for bucket in self.buckets for name, parameter in bucket.parameters.items()}
        if any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in found.values()):
            return {name: _zeros_or_gradient(parameter) for name, parameter in found.items()}
        return {name: torch.randn_like(parameter).detach() for name, parameter in found.items()}

    def _buckets(self, session: Session, fresh: Gradients) -> tuple[list[BucketProfile], list[BucketProfile]]:
        """The buckets of the recipe's stage, and those within a site; none if it sends nothing."""
        if not self.stage.communicates:
            return [], []
        found = time_stage(self.stage, self.fragments, session.recipe.compressor, self.workers, fresh)
        places = [place for place, buckets in enumerate(self.fragments) for _ in buckets]
        buckets = [bucket for buckets in self.fragments for bucket in buckets]
        ready = [0.0] * len(buckets) if self.site else self._ready_seconds()
        own = [
            measured_bucket(bucket.packed, when, place, seconds)
            for bucket, when, place, seconds in zip(buckets, ready, places, found, strict=True)
        ]
        if not self.site:
            return own, []
        inside = time_stage(AT_ONCE, [self.site], Dense(), self.stage.per_site or 1, fresh)
        together = zip(self.site, self._ready_seconds(), inside, strict=True)
        return own, [measured_bucket(bucket.packed, when, 0, seconds) for bucket, when, seconds in together]

    def _ready_seconds(self) -> list[float]:
        places = range(len(self.buckets))
        return [median(max(step.ready[: place + 1]) - step.begin for step in self.kept) for place in places]

    def _measured(self, session: Session, fresh: Gradients) -> WorkloadProfile:
        busy = self.barrier.copies * torch.get_num_threads()
        notes = begun(session.model, session.optimizer, session.recipe, self.fragments, SimulatedGroup(1).transports[0])
        self.meter.start()
        buckets, site_buckets = self._buckets(session, fresh)
        load_slowdown, slowdown = self.meter.stop().slowdown, self.load.slowdown
        buckets, site_buckets = (
            [_alone(each, slowdown, load_slowdown) for each in some] for some in (buckets, site_buckets)
        )
        return WorkloadProfile(
            recipe=repr(session.recipe),
            backward_seconds=median(step.backward - step.begin for step in self.kept) / slowdown,
            rest_seconds=median(step.end - step.backward for step in self.kept) / slowdown,
            buckets=buckets,
            control_bytes=notes.control_bytes,
            buffer_bytes=notes.buffers,
            rider_bytes=notes.rider_bytes,
            site_buckets=site_buckets,
            site_control_bytes=notes.site_control_bytes,
            crowded=not self.buckets[0].flat.is_cuda and busy >= system.cores(),
            copies=self.barrier.copies,
            timed_steps=[(step.end - step.begin) / slowdown for step in self.kept],
            other_load=self.load,
        )


def _zeros_or_gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def measured_bucket(
    packed: FlatTensors, ready_seconds: float, fragment: int, seconds: Mapping[str, Any]
) -> BucketProfile:
    return BucketProfile(
        dtype=dtype_name(packed.flat.dtype),
        shapes={slot.name: slot.shape for slot in packed.layout},
        ready_seconds=ready_seconds,
        fragment=fragment,
        **seconds,
    )


def _alone(bucket: BucketProfile, steps: float, codecs: float) -> BucketProfile:
    """A bucket's seconds without other load, which slowed steps and codecs by these factors."""
    return replace(
        bucket,
        ready_seconds=bucket.ready_seconds / steps,
        computing_seconds=[each / codecs for each in bucket.computing_seconds],
        engine_seconds=[each / codecs for each in bucket.engine_seconds],
        offering_seconds=bucket.offering_seconds / codecs,
        landing_seconds=bucket.landing_seconds / codecs,
        spread_seconds=bucket.spread_seconds / codecs,
    )


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def main() -> None:
    directory, copy, copies, workers, batches, script, *arguments = sys.argv[1:]
    barrier = _Barrier(Path(directory), int(copy), int(copies))
    profiler = _StepProfiler(barrier, int(workers), int(batches))
    register_optimizer_step_post_hook(uncompiled(profiler.after_step))
    try:
        _run_to_its_end(Path(script), arguments)
        profiler.after_script()
    except _Done:
        pass
    finally:
        barrier.arrive(*STAGES)  # otherwise the others would wait for an ended copy


def _run_to_its_end(script: Path, arguments: Sequence[str]) -> None:
    try:
        run_as_main(script, arguments, os.environ["GOSSAMER_RECIPE"])
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    main()
