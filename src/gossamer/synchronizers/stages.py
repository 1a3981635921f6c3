"""From what a strategy says of a stage to what talks in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.compressors import Compressor, Dense
from gossamer.core.aggregation import AggregationContext
from gossamer.errors import AttachError
from gossamer.recipes.recipe import Recipe
from gossamer.reducer.bucket import Bucket
from gossamer.reducer.bucketing import assign_buckets, assign_fragments
from gossamer.runtime.comm_thread import CommThread
from gossamer.runtime.transport import Transport
from gossamer.strategies import GossipStrategy, PeriodicSchedule, Stage
from gossamer.synchronizers.base import LoopState, SyncContext, Synchronizer
from gossamer.synchronizers.delayed_gradients import DelayedGradients
from gossamer.synchronizers.gossip import GossipAveraging
from gossamer.synchronizers.gradients import GradientSynchronizer
from gossamer.synchronizers.hierarchical import HierarchicalLocalSGD
from gossamer.synchronizers.pairwise_gossip import PairwiseGossip
from gossamer.synchronizers.parameter_averaging import ParameterAveraging
from gossamer.synchronizers.parameter_server import ServerSynchronizer
from gossamer.synchronizers.scheduled import ScheduledSynchronizer

Fragments = Sequence[Sequence[Bucket]]
Parameters = Mapping[str, Parameter]


def bucket_fragments(stage: Stage, parameters: Parameters, compressor: Compressor, at: AggregationContext) -> Fragments:
    """The buckets of a stage, by the fragments that take turns."""
    count = 1 if stage.merging is None else stage.merging.schedule.fragments
    if stage.mixing is not None:
        at = replace(at, rank=0, world=1)  # each worker compresses by itself
    if stage.serving is not None:
        compressor = Dense()  # by server and not by bucket
    parts = [parameters] if count == 1 else assign_fragments(parameters, count)
    return [[Bucket(bucket, compressor, at) for bucket in assign_buckets(part)] for part in parts]


def site_size(stage: Stage, world: int) -> int:
    """How many workers average their gradients. Raises AttachError where sites would have different sizes."""
    if stage.per_site is None or world % stage.per_site:
        raise AttachError(
            f"{world} workers do not make sites of {stage.per_site} each, and some would average over fewer. Run a "
            f"multiple of {stage.per_site} workers, or choose another per_site."
        )
    return stage.per_site


@dataclass
class StageSequence:
    """A recipe's stages, one after the other. now: the one that goes on."""

    recipe: Recipe
    optimizer: Optimizer
    transport: Transport
    comm_thread: CommThread
    loop: LoopState
    seed: int
    now: Stage = field(init=False)

    def __post_init__(self) -> None:
        self.now = self.recipe.strategy.stages[0]

    def at(self, transport: Transport) -> AggregationContext:
        return AggregationContext(seed=self.seed, rank=transport.rank, world=transport.world)

    def fragments(self, parameters: Parameters) -> Fragments:
        return bucket_fragments(self.now, parameters, self.recipe.compressor, self.at(self.transport))

    def begin(self, parameters: Parameters, fragments: Fragments) -> Synchronizer | None:
        """Go on with parameters as they are, alike on every rank. None alone: plain training, bit for bit."""
        if self.transport.world == 1:
            return None
        exchange = self._made(parameters, fragments)
        later = [stage.start for stage in self.recipe.strategy.stages if stage.start > self.now.start]
        exchange.last_pass = min(later, default=None)
        return exchange

    def _made(self, parameters: Parameters, fragments: Fragments) -> Synchronizer:
        now, optimizer, (buckets, *_) = self.now, self.optimizer, fragments
        context = self._context(self.transport)
        if now.merging is not None:
            task = ParameterAveraging(now.merging, fragments, optimizer, self.loop, guards_gradients=not now.averages)
            if now.averages:
                site = self._site()
                inside = [Bucket(part, Dense(), self.at(site.transport)) for part in assign_buckets(parameters)]
                return HierarchicalLocalSGD(inside, site, now.merging.schedule, fragments, task, context, now.start)
            return ScheduledSynchronizer(now.merging.schedule, fragments, task, context, now.start)
        if now.mixing is not None:
            return self._mixes(now.mixing, buckets)
        if now.serving is not None:
            return ServerSynchronizer(now.serving, parameters, buckets, optimizer, self.recipe, context, self._tell)
        if now.delay:
            schedule = PeriodicSchedule(1, delay=now.delay)
            return ScheduledSynchronizer(schedule, [buckets], DelayedGradients(buckets, self.loop), context)
        return GradientSynchronizer(buckets, context, now.accumulate)

    def _mixes(self, strategy: GossipStrategy, buckets: Sequence[Bucket]) -> Synchronizer:
        topology, context = self.recipe.topology, self._context(self.transport)
        if not strategy.in_lock_step:
            return PairwiseGossip(strategy, topology, buckets, context, self._tell)
        return GossipAveraging(strategy, topology, buckets, context)

    def _context(self, transport: Transport) -> SyncContext:
        return SyncContext(transport, self.comm_thread, self.loop, self.recipe.compressor, self.seed)

    def _tell(self, text: str) -> list[str]:
        return self.comm_thread.submit(partial(self.transport.all_gather_text, text)).wait()

    def enter(self, passes: int, parameters: Parameters, before: Synchronizer) -> Synchronizer:
        """Be in the stage that goes on after so many backward passes."""
        stage = self._after(passes)
        if stage == self.now:
            return before
        before.close()
        self.now = stage
        for parameter in parameters.values():
            parameter.grad = None  # they lie in buckets that go
        following = self.begin(parameters, self.fragments(parameters))
        assert following is not None
        following.continue_from(before)
        return following

    def over(self, passes: int) -> bool:
        """Whether another stage begins."""
        return self._after(passes) != self.now

    def _after(self, passes: int) -> Stage:
        *_, stage = [stage for stage in self.recipe.strategy.stages if stage.start <= passes]
        return stage

    def _site(self) -> SyncContext:
        """Neighboring workers, dense: within a site bytes are cheap."""
        site = self.transport.part(site_size(self.now, self.transport.world))
        return replace(self._context(site), compressor=Dense())
