"""Stages: builds the buckets and the synchronizer of each stage of a recipe, and switches between stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import assert_never

from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.compressors import Compressor, Dense
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import (
    AveragingStage,
    FederatedStage,
    GossipStage,
    GradientStage,
    LocalServerStage,
    ServerStage,
    SilentStage,
    Stage,
)
from gossamer.base import rng
from gossamer.base.aggregation import AggregationContext
from gossamer.base.transport import Transport
from gossamer.comm.runtime.comm_thread import CommThread
from gossamer.train.engine.bucket import (
    BUCKET_BYTES,
    FIRST_BYTES,
    Bucket,
    assign_buckets,
    assign_fragments,
    layout_text,
)
from gossamer.train.engine.loop import LoopState
from gossamer.train.engine.sparse_gradients import SparseGradients
from gossamer.train.synchronizers.base import SoloSynchronizer, SyncContext, Synchronizer
from gossamer.train.synchronizers.delayed_gradients import DelayedGradients
from gossamer.train.synchronizers.gossip import GossipAveraging
from gossamer.train.synchronizers.gradients import GradientSynchronizer
from gossamer.train.synchronizers.hierarchical import HierarchicalLocalSGD
from gossamer.train.synchronizers.parameter_averaging import ParameterAveraging
from gossamer.train.synchronizers.scheduled import ScheduledSynchronizer

Fragments = Sequence[Sequence[Bucket]]
Parameters = Mapping[str, Parameter]


def bucket_fragments(
    stage: Stage,
    parameters: Parameters,
    compressor: Compressor,
    at: AggregationContext,
    first_bytes: int = FIRST_BYTES,
) -> Fragments:
    """The buckets of a stage, by fragment; fragments are synchronized in turn."""
    if isinstance(stage, GossipStage):
        at = replace(at, rank=0, world=1)  # each worker compresses independently
    compressor = _bucket_compressor(stage, compressor)
    parts = divide_parameters(stage, parameters, first_bytes)
    return [[Bucket(bucket, compressor, at) for bucket in part] for part in parts]


def divide_parameters(
    stage: Stage, parameters: Parameters, first_bytes: int = FIRST_BYTES
) -> list[list[dict[str, Parameter]]]:
    """Divide parameters into the buckets of a stage, by fragment.

    A stage that sends during backward has a first bucket of `first_bytes`, which a slow link carries during the rest of
    the pass. Other stages send all buckets of a fragment at once, so a small one would have no use.
    """
    count = 1 if isinstance(stage, ServerStage) else stage.schedule.fragments
    parts = [parameters] if count == 1 else assign_fragments(parameters, count)
    sends_in_backward = isinstance(stage, GradientStage) and not stage.scheduled
    return [assign_buckets(part, first_bytes=first_bytes if sends_in_backward else BUCKET_BYTES) for part in parts]


def _bucket_compressor(stage: Stage, compressor: Compressor) -> Compressor:
    return Dense() if isinstance(stage, ServerStage) else compressor  # compression is per server, not per bucket


@dataclass
class StageSequence:
    """The stages of a recipe, in order."""

    recipe: Recipe
    optimizer: Optimizer | None  # None if the session does not know it
    transport: Transport
    comm_thread: CommThread
    loop: LoopState
    seed: int
    since: int = 0  # the step at which the recipe was started; its schedules and warm-ups count from there
    first_bytes: int = FIRST_BYTES  # of the first bucket, in stages that send during backward
    now: Stage = field(init=False)  # the current one

    def __post_init__(self) -> None:
        self.seed = rng.address(self.seed, "since", self.since) if self.since else self.seed
        self.now = self._stages[0]

    @property
    def _stages(self) -> list[Stage]:
        return [replace(stage, start=stage.start + self.since) for stage in self.recipe.strategy.stages]

    def at(self, transport: Transport) -> AggregationContext:
        return AggregationContext(seed=self.seed, rank=transport.rank, world=transport.world)

    def fragments(self, parameters: Parameters) -> Fragments:
        """Buckets of all parameters if parameters are averaged; otherwise of those with dense gradients."""
        dense, at = self._bucketed(self.now, parameters), self.at(self.transport)
        return bucket_fragments(self.now, dense, self.recipe.compressor, at, self.first_bytes)

    def layout_text(self, parameters: Parameters) -> str:
        """A fingerprint of the layout of the first stage's messages, the same on every rank."""
        stage = self._stages[0]
        parts = divide_parameters(stage, self._bucketed(stage, parameters), self.first_bytes)
        compressor = _bucket_compressor(stage, self.recipe.compressor)
        return layout_text(chain(*parts), compressor) + self._sparse(parameters).fingerprint()

    def _bucketed(self, stage: Stage, parameters: Parameters) -> Parameters:
        return parameters if stage.local_parameters else self._dense(parameters)

    def _redivide(self, parameters: Parameters, first_bytes: int) -> bool:
        """Set the size of the first bucket. Returns whether this changes the buckets of the current stage."""
        sizes, self.first_bytes = (self.first_bytes, first_bytes), first_bytes
        bucketed = self._bucketed(self.now, parameters)
        before, after = ([[*each] for each in chain(*divide_parameters(self.now, bucketed, size))] for size in sizes)
        return before != after

    def _sparse(self, parameters: Parameters) -> SparseGradients:
        names = self.loop.sparse()
        return SparseGradients({name: parameter for name, parameter in parameters.items() if name in names})

    def _dense(self, parameters: Parameters) -> Parameters:
        names = self.loop.sparse()
        return {name: parameter for name, parameter in parameters.items() if name not in names}

    def begin(self, parameters: Parameters, fragments: Fragments) -> Synchronizer:
        """Start the current stage from equal parameters on every rank; one worker alone trains plainly."""
        if self.comm_thread.is_alone(self.transport.world) or not self.now.communicates:
            return self._begin_alone(parameters)
        exchange = self.make(parameters, fragments)
        later = [stage.start for stage in self._stages if stage.start > self.now.start]
        exchange.last_pass = min(later, default=None)
        return exchange

    def _begin_alone(self, parameters: Parameters) -> Synchronizer:
        """Synchronizer of a single worker. A global batch still takes several passes. Nothing is compressed."""
        match self.now:
            case GradientStage(batches=int()) as stage:
                context = replace(
                    self._context(self.transport), compressor=Dense(), loop=replace(self.loop, tensors=None)
                )
                buckets = self._dense_buckets(parameters, self.transport)
                return GradientSynchronizer(buckets, self._sparse(parameters), context, stage)
            case _:
                return SoloSynchronizer(self.loop.ended)

    def _dense_buckets(self, parameters: Parameters, transport: Transport) -> list[Bucket]:
        return [Bucket(part, Dense(), self.at(transport)) for part in assign_buckets(self._dense(parameters))]

    def make(self, parameters: Parameters, fragments: Fragments) -> Synchronizer:
        """The synchronizer of the current stage."""
        (buckets, *_), context = fragments, self._context(self.transport)
        match self.now:
            case GradientStage(delay=0) as stage:
                return GradientSynchronizer(buckets, self._sparse(parameters), context, stage)
            case GradientStage() as stage:
                task = DelayedGradients(buckets, self.loop)
                return ScheduledSynchronizer(stage.schedule, [buckets], task, context, stage.start)
            case AveragingStage() as stage:
                return self._averaging(stage, parameters, fragments, context)
            case GossipStage(strategy=strategy) as stage if strategy.in_lock_step:
                return GossipAveraging(strategy, self.recipe.topology, buckets, context, stage.start)
            case GossipStage(strategy=strategy):  # imported here: most sessions have no peers, and start sooner
                from gossamer.train.synchronizers.pairwise_gossip import PairwiseGossip

                return PairwiseGossip(strategy, self.recipe.topology, buckets, context, self._all_gather_text)
            case LocalServerStage(strategy=strategy):
                from gossamer.train.synchronizers.server_averaging import ServerAveraging

                return ServerAveraging(
                    strategy, parameters, buckets, self.optimizer, self.recipe, context, self._all_gather_text
                )
            case ServerStage(strategy=strategy):
                from gossamer.train.synchronizers.parameter_server import ServerSynchronizer

                return ServerSynchronizer(
                    strategy, parameters, buckets, self.optimizer, self.recipe, context, self._all_gather_text
                )
            case SilentStage():
                return SoloSynchronizer(self.loop.ended)
            case FederatedStage() as stage:
                stage.refuse()
            case stage:
                assert_never(stage)

    def _averaging(
        self, stage: AveragingStage, parameters: Parameters, fragments: Fragments, context: SyncContext
    ) -> Synchronizer:
        """Averaging of parameters; with sites also of gradients within a site, uncompressed: HierarchicalLocalSGD."""
        guards = stage.per_site is None
        merges_own = stage.strategy.merges_own(self.recipe.compressor)
        task = ParameterAveraging(
            stage.strategy, fragments, self.optimizer, self.loop, guards_gradients=guards, merges_own=merges_own
        )
        if stage.per_site is None:
            by_speed = stage.follows_speed
            return ScheduledSynchronizer(stage.schedule, fragments, task, context, stage.start, by_speed=by_speed)
        transport = self.transport.part(stage.site_size(self.transport.world))
        site = replace(self._context(transport), compressor=Dense(), loop=replace(self.loop, tensors=None))
        inside, sparse = self._dense_buckets(parameters, transport), self._sparse(parameters)
        return HierarchicalLocalSGD(inside, sparse, site, stage.schedule, fragments, task, context, stage.start)

    def _context(self, transport: Transport) -> SyncContext:
        return SyncContext(transport, self.comm_thread, self.loop, self.recipe.compressor, self.seed, self.since)

    def _all_gather_text(self, text: str) -> list[str]:
        return self.comm_thread.exchange(partial(self.transport.all_gather_text, text)).wait()

    def enter(
        self, passes: int, parameters: Parameters, before: Synchronizer, first_bytes: int | None = None
    ) -> Synchronizer:
        """Switch to the stage at backward pass `passes`, if it is another one or needs other buckets.

        Args:
            first_bytes: size of the first bucket from now on, as in the state to restore; None: unchanged.
        """
        stage = self._after(passes)
        redivided = first_bytes is not None and self._redivide(parameters, first_bytes)
        if stage == self.now and not redivided:
            return before
        before.close()
        self.now = stage
        for parameter in parameters.values():
            parameter.grad = None  # a view of a bucket that is dropped
        following = self.begin(parameters, self.fragments(parameters))
        following.continue_from(before)
        return following

    def over(self, passes: int) -> bool:
        """Whether another stage begins at backward pass `passes`."""
        return self._after(passes) != self.now

    def _after(self, passes: int) -> Stage:
        if self.comm_thread.is_alone(self.transport.world):
            return self.now  # plain training has one stage
        *_, stage = [stage for stage in self._stages if stage.start <= passes]
        return stage
