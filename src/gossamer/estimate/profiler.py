"""One copy of a script that is measured: how its steps pass, and how fast its gradients are compressed.

`python -m gossamer.estimate.profiler DIRECTORY COPY COPIES WORKERS SCRIPT ARGS...` leaves its numbers in DIRECTORY.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gossamer.compressors import Dense
from gossamer.core.aggregation import AggregationContext
from gossamer.core.layout import FlatTensors, dtype_name
from gossamer.estimate.exchange_timer import Gradients, time_stage
from gossamer.estimate.user_script import as_main
from gossamer.estimate.workload_profile import STEADY, BucketProfile, WorkloadProfile
from gossamer.recipes.recipe import resolve
from gossamer.reducer.bucket import Bucket
from gossamer.reducer.bucketing import assign_buckets
from gossamer.reducer.parameter_views import trainable
from gossamer.runtime.open_sessions import open_sessions
from gossamer.session.lifecycle_events import begun
from gossamer.session.session import Session
from gossamer.strategies import Stage
from gossamer.synchronizers.stages import Fragments, bucket_fragments
from gossamer.transports.simulated import SimulatedGroup

AT_ONCE = Stage(0, averages=True)
WARM_UP_STEPS = 3
STEPS = 6


def results(directory: Path, copies: int) -> list[Path]:
    return [directory / f"measured-{copy}.json" for copy in range(copies)]


# -- one copy ----------------------------------------------------------------------------------------------------------


class _Done(BaseException):
    """Ends a script that has been measured. Not an Exception, so that its own handlers let it pass."""


@dataclass(frozen=True)
class _Meeting:
    """Copies tell each other how far they are: by files. Whoever waits goes on training, so that all stay busy."""

    directory: Path
    copy: int
    copies: int

    def arrive(self, stage: str) -> None:
        (self.directory / f"{stage}-{self.copy}").touch()

    def all_at(self, stage: str) -> bool:
        return all((self.directory / f"{stage}-{copy}").exists() for copy in range(self.copies))


@dataclass
class _Times:
    """The moments of one step."""

    begin: float
    ready: list[float]
    backward: float = 0.0
    end: float = 0.0


@dataclass
class _Probe:
    """Watches a session's steps from outside, and ends the script when it has seen enough."""

    meeting: _Meeting
    workers: int
    asker: int = field(default_factory=os.getppid)
    session: Session | None = None
    stage: Stage = AT_ONCE
    fragments: Fragments = ()
    site: Sequence[Bucket] = ()
    buckets: Sequence[Bucket] = ()
    steps: int = 0
    kept: list[_Times] = field(default_factory=list)
    now: _Times | None = None

    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        session = next(
            (each for each in open_sessions() if isinstance(each, Session) and each.optimizer is optimizer), None
        )
        if session is None:
            return
        if os.getppid() != self.asker:
            raise _Done  # nobody is left to read what would be found
        if self.session is None:
            self._watch(session)
        _synchronize()
        moment = time.perf_counter()
        self._count(moment)
        if len(self.kept) >= STEPS:
            self.meeting.arrive("steps")
            if self.meeting.all_at("steps"):
                self._finish(session)
        self.now = _Times(time.perf_counter(), [0.0] * len(self.buckets))

    def _watch(self, session: Session) -> None:
        self.session, self.stage = session, session.recipe.strategy.stages[-1]
        parameters, at = trainable(session.model), AggregationContext(step=STEADY, world=self.workers)
        self.fragments = bucket_fragments(self.stage, parameters, session.recipe.compressor, at)
        if self.stage.per_site is not None:
            self.site = [Bucket(part, Dense(), at) for part in assign_buckets(parameters)]
        self.buckets = self.site or [bucket for buckets in self.fragments for bucket in buckets]
        for place, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters.values():
                parameter.register_post_accumulate_grad_hook(partial(self._ready, place))

    def _ready(self, place: int, parameter: Tensor) -> None:
        if self.now is None:
            return
        if not any(self.now.ready):
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        self.now.ready[place] = time.perf_counter()

    def _backward_ended(self) -> None:
        if self.now is not None:
            self.now.backward = time.perf_counter()

    def _count(self, moment: float) -> None:
        if self.now is None:
            return
        self.steps += 1
        if self.steps >= WARM_UP_STEPS:
            self.meeting.arrive("warm")
        if self.steps > WARM_UP_STEPS and self.now.backward and self.meeting.all_at("warm") and len(self.kept) < STEPS:
            self.now.end = moment
            self.kept.append(self.now)

    def _finish(self, session: Session) -> None:
        """Measure the codecs with the gradients that are here, next to copies that do the same."""
        fresh = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            for bucket in self.buckets
            for name, parameter in bucket.parameters.items()
        }
        measured = self._measured(session, fresh)
        self.meeting.arrive("codecs")
        while not self.meeting.all_at("codecs"):
            self._buckets(session, fresh)
        path = results(self.meeting.directory, self.meeting.copies)[self.meeting.copy]
        path.write_text(json.dumps(measured.to_json()))
        raise _Done

    def _buckets(self, session: Session, fresh: Gradients) -> tuple[list[BucketProfile], list[BucketProfile]]:
        """Those of the recipe, and those within a site."""
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
        busy = self.meeting.copies * torch.get_num_threads()
        said = begun(session.model, session.optimizer, session.recipe, self.fragments, SimulatedGroup(1).transports[0])
        buckets, site_buckets = self._buckets(session, fresh)
        return WorkloadProfile(
            recipe=repr(session.recipe),
            backward_seconds=median(step.backward - step.begin for step in self.kept),
            rest_seconds=median(step.end - step.backward for step in self.kept),
            buckets=buckets,
            control_bytes=said.control_bytes,
            buffer_bytes=_moving_buffers(session.model) if said.buffer_bytes else (),
            rider_bytes=said.rider_bytes,
            site_buckets=site_buckets,
            site_control_bytes=said.site_control_bytes,
            crowded=not self.buckets[0].flat.is_cuda and busy >= (os.cpu_count() or 1),
            copies=self.meeting.copies,
        )


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


def _moving_buffers(model: nn.Module) -> list[int]:
    """Bytes of each buffer that training moves in every step."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    return [buffer.nbytes for norm in norms for buffer in norm.buffers(recurse=False)]


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def main() -> None:
    directory, copy, copies, workers, script, *arguments = sys.argv[1:]
    meeting = _Meeting(Path(directory), int(copy), int(copies))
    register_optimizer_step_post_hook(_Probe(meeting, int(workers)).after_step)
    try:
        with as_main(Path(script), arguments, resolve(os.environ["GOSSAMER_RECIPE"])):
            runpy.run_path(script, run_name="__main__")
    except _Done:
        pass
    finally:
        for stage in ("warm", "steps", "codecs"):  # nobody waits for a copy that has ended
            meeting.arrive(stage)


if __name__ == "__main__":
    main()
