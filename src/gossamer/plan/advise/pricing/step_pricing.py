"""Step pricing: prices many recipes for one profiled script; codecs are timed once, models laid out once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, prod

import torch
from torch.nn import Parameter

from gossamer.algorithms.compressors import Compressor, Dense
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import GossipStage, Stage
from gossamer.base.layout import Layout, dtype_name, dtype_of
from gossamer.comm.network import Network
from gossamer.events import Attached
from gossamer.plan.estimate.step_time import StepTimeEstimate, estimate_step_time
from gossamer.plan.estimate.workload_profile import BucketProfile, WorkloadProfile
from gossamer.plan.profiling.profile_runs import time_codec, worker_threads
from gossamer.plan.profiling.profiler import AT_ONCE
from gossamer.train.engine.bucket import arrange, assign_buckets, assign_fragments
from gossamer.train.session.lifecycle_events import round_control_bytes
from gossamer.train.traffic.op_trace import trace_ops
from gossamer.train.traffic.traffic import TrafficEstimate, estimate_traffic

MOST_TIMED = 2**22  # entries of a bucket that a codec is timed with; larger ones take longer in proportion
COUNTER_BYTES = 8  # of a buffer that only counts, and is not averaged


@dataclass(frozen=True)
class _Codec:
    """Seconds of a compressor for each entry of a bucket, by the names in BucketProfile."""

    computing: Sequence[float]
    engine: Sequence[float]


@dataclass
class StepPricer:
    """Foretells steps of any recipe for one script, from its profile in lock step with nothing compressed.

    What a compressor computes does not depend on when it is asked to, so it is timed once, with random numbers, for
    every number of operations that a bucket may take; a strategy's own work on parameters is timed once, uncompressed.
    """

    base: WorkloadProfile  # with resolve(None)
    workers: int
    _codecs: dict[tuple[object, ...], _Codec] = field(default_factory=dict)
    _passing: dict[tuple[type, bool], tuple[float, float]] = field(default_factory=dict)
    _profiles: dict[Recipe, WorkloadProfile] = field(default_factory=dict)

    def profile(self, recipe: Recipe) -> WorkloadProfile:
        """What the script's step would be with a resolved recipe: its computing, that recipe's buckets and codecs."""
        if recipe not in self._profiles:
            with worker_threads(self.workers):
                self._profiles[recipe] = self._profile(recipe)
        return self._profiles[recipe]

    def step_time(self, recipe: Recipe, network: Network) -> StepTimeEstimate:
        """Seconds of a steady step of a resolved recipe on a network."""
        return estimate_step_time(recipe, self.profile(recipe), network, self.workers)

    def traffic(self, recipe: Recipe) -> TrafficEstimate:
        """Bytes that a resolved recipe sends and keeps."""
        return estimate_traffic(recipe, self._attached(recipe), workers=self.workers)

    # -- the model under a recipe --------------------------------------------------------------------------------------

    @cached_property
    def _parameters(self) -> Mapping[str, Parameter]:
        """On the meta device, in about the model's own order: buckets begin with the last ones."""
        shapes = [(name, shape, each.dtype) for each in self.base.buckets for name, shape in each.shapes.items()]
        return {
            name: Parameter(torch.empty(tuple(shape), dtype=dtype_of(dtype), device="meta"))
            for name, shape, dtype in reversed(shapes)
        }

    @cached_property
    def _ready_seconds(self) -> Mapping[str, float]:
        """When the bucket of each parameter is complete."""
        return {name: each.ready_seconds for each in self.base.buckets for name in each.shapes}

    def _stage(self, recipe: Recipe) -> Stage:
        return recipe.strategy.among(self.workers).steady_stage

    def _layouts(self, recipe: Recipe) -> list[tuple[int, str, Layout]]:
        """(fragment, dtype, layout) of each bucket, as a session would lay them out."""
        count = self._stage(recipe).schedule.fragments
        parts = assign_fragments(self._parameters, count) if count > 1 else [self._parameters]
        return [
            (place, dtype_name(next(iter(bucket.values())).dtype), arrange(bucket, recipe.compressor))
            for place, part in enumerate(parts)
            for bucket in assign_buckets(part)
        ]

    def _attached(self, recipe: Recipe) -> Attached:
        """As a session of the script would tell of itself; its buffers are known from the profile."""
        stage, layouts = self._stage(recipe), self._layouts(recipe)
        at_once, averaged = stage.averages_gradients_at_once and not stage.scheduled, self._averaged_buffer_bytes
        return Attached(
            recipe=repr(recipe),
            layouts=tuple((dtype, layout) for _, dtype, layout in layouts),
            fragments=tuple(place for place, *_ in layouts),
            parameters=sum(layout.numel for *_, layout in layouts),
            control_bytes=self.base.control_bytes if at_once else round_control_bytes(stage, len(self._parameters), 0),
            buffer_bytes=sum(self.base.buffer_bytes) if stage.averages_gradients_at_once else 0,
            rider_bytes=(averaged, *[0.0] * (stage.schedule.fragments - 1)) if stage.scheduled else (),
            site_control_bytes=self.base.control_bytes if stage.per_site is not None else 0,
            period=stage.schedule.period if stage.local_parameters else 1,
            rank=0,
            world=self.workers,
        )

    @property
    def _averaged_buffer_bytes(self) -> float:
        """Of BatchNorm's statistics and the like, without its counters."""
        return float(sum(nbytes for nbytes in self.base.buffer_bytes if nbytes > COUNTER_BYTES))

    def _profile(self, recipe: Recipe) -> WorkloadProfile:
        stage, told = self._stage(recipe), self._attached(recipe)
        buckets = [self._bucket(recipe, stage, dtype, layout, place) for place, dtype, layout in self._layouts(recipe)]
        return replace(
            self.base,
            recipe=repr(recipe),
            buckets=buckets,
            control_bytes=told.control_bytes,
            buffer_bytes=self.base.buffer_bytes if told.buffer_bytes else (),
            rider_bytes=told.rider_bytes,
            site_buckets=self._site_buckets(stage.per_site) if stage.per_site else [],
            site_control_bytes=told.site_control_bytes,
        )

    def _site_buckets(self, per_site: int) -> list[BucketProfile]:
        """Gradients travel dense within a site."""
        return [
            self._timed(Recipe(), AT_ONCE, each.dtype, Layout.of(each.shapes), per_site) for each in self.base.buckets
        ]

    # -- seconds -------------------------------------------------------------------------------------------------------

    def _bucket(self, recipe: Recipe, stage: Stage, dtype: str, layout: Layout, place: int) -> BucketProfile:
        offering, landing = self._strategy_seconds(recipe, stage, dtype, layout)
        return replace(
            self._timed(recipe, stage, dtype, layout, self.workers),
            fragment=place,
            offering_seconds=offering * layout.numel,
            landing_seconds=landing * layout.numel,
        )

    def _timed(self, recipe: Recipe, stage: Stage, dtype: str, layout: Layout, workers: int) -> BucketProfile:
        codec = self._codec(recipe, stage, dtype, layout, workers)
        return BucketProfile(
            dtype=dtype,
            shapes={slot.name: slot.shape for slot in layout},
            ready_seconds=max(self._ready_seconds[name] for name in layout.names),
            computing_seconds=[layout.numel * each for each in codec.computing],
            engine_seconds=[layout.numel * each for each in codec.engine],
        )

    def _codec(self, recipe: Recipe, stage: Stage, dtype: str, layout: Layout, workers: int) -> _Codec:
        gossip = isinstance(stage, GossipStage)
        operations = 1 if gossip else len(trace_ops(recipe, layout, dtype_of(dtype), workers))
        kind = recipe.strategy if gossip else None
        key = (recipe.compressor, kind, dtype, operations, workers)
        if key not in self._codecs:
            self._codecs[key] = _time(dtype, layout, stage if gossip else AT_ONCE, recipe.compressor, workers)
        return self._codecs[key]

    def _strategy_seconds(self, recipe: Recipe, stage: Stage, dtype: str, layout: Layout) -> tuple[float, float]:
        """Of the training thread before and after a round, for each entry."""
        if not stage.scheduled or isinstance(stage, GossipStage):
            return 0.0, 0.0
        kind = (type(recipe.strategy), stage.local_parameters)
        if kind not in self._passing:
            sample = _shrunk(layout)
            seconds = time_codec(dtype, sample, stage, Dense(), self.workers)
            self._passing[kind] = tuple(
                seconds[name] / sample.numel for name in ("offering_seconds", "landing_seconds")
            )
        return self._passing[kind]


def _time(dtype: str, layout: Layout, stage: Stage, compressor: Compressor, workers: int) -> _Codec:
    sample = _shrunk(layout)
    seconds = time_codec(dtype, sample, stage, compressor, workers)
    return _Codec(
        computing=[each / sample.numel for each in seconds["computing_seconds"]],
        engine=[each / sample.numel for each in seconds["engine_seconds"]],
    )


def _shrunk(layout: Layout, most: int = MOST_TIMED) -> Layout:
    """The same tensors with fewer rows each, where they have more entries together than that."""
    share = min(1.0, most / layout.numel)
    return Layout.of({slot.name: _fewer_rows(slot.shape, share) for slot in layout})


def _fewer_rows(shape: Sequence[int], share: float) -> tuple[int, ...]:
    return (ceil(shape[0] * share), *shape[1:]) if len(shape) and prod(shape) else tuple(shape)
