"""Prices: seconds, bytes and memory of every candidate's step on a network, and the candidates worth a trial.

Codecs are timed once, models laid out once.

A saving of less than a tenth of a step relative to lossless recipes is not worth a change (Agarwal et al. 2022, MLSys,
arXiv:2103.00543: true of most proposals; Han et al. 2024, arXiv:2407.01378: compare with half precision).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import ceil, prod

import torch
from torch.nn import Parameter

from gossamer.algorithms.compressors import Compressor, Dense
from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.algorithms.strategies import GossipStage, Stage
from gossamer.base import system
from gossamer.base.layout import Layout, dtype_name, dtype_of
from gossamer.base.units import bytes_text, seconds_text
from gossamer.comm.network import Network
from gossamer.errors import GossamerError
from gossamer.plan.advise.candidates import DENSE, Candidate
from gossamer.plan.estimate.calibration import ForecastInterval
from gossamer.plan.estimate.step_cost import step_cost
from gossamer.plan.estimate.step_time import StepTimeEstimate, estimate_step_time, is_predictable, peer_step_seconds
from gossamer.plan.estimate.workload_profile import BucketProfile, WorkloadProfile
from gossamer.plan.profile.gradient_statistics import GradientStatistics
from gossamer.plan.profile.profile_runs import time_codec, worker_threads
from gossamer.plan.profile.profiler import AT_ONCE
from gossamer.train.engine.bucket import arrange, assign_buckets
from gossamer.train.session.lifecycle_events import round_control_bytes
from gossamer.train.synchronizers.stages import divide_parameters
from gossamer.train.traffic.op_trace import trace_ops
from gossamer.train.traffic.traffic import TrafficEstimate, estimate_traffic

# -- a step ------------------------------------------------------------------------------------------------------------


MOST_TIMED = 2**22  # entries of a bucket to time a codec; times of larger ones are proportional
COUNTER_BYTES = 8  # of a scalar integer buffer, such as BatchNorm's count of batches
PAIR = 2  # workers in an exchange of one with a server or with another worker
AVERAGED_COUNTER_BYTES = 4  # counters are averaged along with numbers in float32


@dataclass(frozen=True)
class _Codec:
    """Seconds of a compressor per entry of a bucket, named as in BucketProfile."""

    computing: Sequence[float]
    engine: Sequence[float]


@dataclass
class StepPricer:
    """Estimates steps of any recipe for one script, from its profile in lock step without compression.

    The cost of a compressor does not depend on the time of its call, so it is timed once, with random numbers, for
    every number of operations that a bucket may have; a strategy's own work on parameters is timed once, uncompressed.
    """

    base: WorkloadProfile  # with resolve(None)
    workers: int
    _codecs: dict[tuple[object, ...], _Codec] = field(default_factory=dict)
    _passing: dict[tuple[type, bool], tuple[float, float]] = field(default_factory=dict)
    _profiles: dict[Recipe, WorkloadProfile] = field(default_factory=dict)

    def profile(self, recipe: Recipe) -> WorkloadProfile:
        """The profile of the script's step with a resolved recipe: its compute time, and that recipe's buckets."""
        if recipe not in self._profiles:
            with worker_threads(self.workers):
                self._profiles[recipe] = self._profile(recipe)
        return self._profiles[recipe]

    def step_time(self, recipe: Recipe, network: Network) -> StepTimeEstimate:
        """Seconds of a steady step of a resolved recipe on a network."""
        return estimate_step_time(recipe, self.profile(recipe), network, self.workers)

    def seconds(self, recipe: Recipe, network: Network) -> float:
        """Seconds of a step; a lower bound if workers do not wait for each other: see `step_cost`."""
        if is_predictable(recipe):
            return self.step_time(recipe, network).step_seconds
        profile = self.profile(recipe)
        seconds, speeds = peer_step_seconds(recipe, profile, workers=1)[0], profile.speeds[: self.workers]
        found = step_cost(recipe, profile.model, network, self.workers, seconds, lambda: profile, speeds)
        return found.seconds

    def traffic(self, recipe: Recipe) -> TrafficEstimate:
        """Bytes that a resolved recipe sends and stores."""
        return estimate_traffic(recipe, self.profile(recipe).model, workers=self.workers)

    # -- the model under a recipe --------------------------------------------------------------------------------------

    @cached_property
    def _parameters(self) -> Mapping[str, Parameter]:
        """Parameters on the meta device, in approximately the model's order: buckets begin with the last ones."""
        shapes = [(name, shape, each.dtype) for each in self.base.buckets for name, shape in each.shapes.items()]
        return {
            name: Parameter(torch.empty(tuple(shape), dtype=dtype_of(dtype), device="meta"))
            for name, shape, dtype in reversed(shapes)
        }

    @cached_property
    def _ready_seconds(self) -> Mapping[str, float]:
        """Time at which the bucket of each parameter is complete."""
        return {name: each.ready_seconds for each in self.base.buckets for name in each.shapes}

    def _stage(self, recipe: Recipe) -> Stage:
        return recipe.strategy.among(self.workers).steady_stage

    def _layouts(self, recipe: Recipe) -> list[tuple[int, str, Layout]]:
        """(fragment, dtype, layout) of each bucket, in a session's layout."""
        return [
            (place, dtype_name(next(iter(bucket.values())).dtype), arrange(bucket, recipe.compressor))
            for place, part in enumerate(divide_parameters(self._stage(recipe), self._parameters))
            for bucket in part
        ]

    @property
    def _averaged_buffer_bytes(self) -> float:
        """Bytes of averaged buffers, such as BatchNorm's statistics, with their counters."""
        sizes = self.base.buffer_bytes
        return float(sum(AVERAGED_COUNTER_BYTES if nbytes == COUNTER_BYTES else nbytes for nbytes in sizes))

    def _profile(self, recipe: Recipe) -> WorkloadProfile:
        stage = self._stage(recipe)
        in_every_step, per_site = stage.averages_gradients_at_once and not stage.scheduled, stage.per_site
        buckets = [self._bucket(recipe, stage, dtype, layout, place) for place, dtype, layout in self._layouts(recipe)]
        averaged = (self._averaged_buffer_bytes, *[0.0] * (stage.schedule.fragments - 1))
        return replace(
            self.base,
            recipe=repr(recipe),
            buckets=buckets,
            control_bytes=(
                self.base.control_bytes if in_every_step else round_control_bytes(stage, len(self._parameters), 0)
            ),
            buffer_bytes=self.base.buffer_bytes if stage.averages_gradients_at_once else (),
            rider_bytes=averaged if stage.scheduled else (),
            site_buckets=self._site_buckets(per_site) if per_site else [],
            site_control_bytes=self.base.control_bytes if per_site is not None else 0,
        )

    def _site_buckets(self, per_site: int) -> list[BucketProfile]:
        """Buckets within a site, where gradients are sent dense."""
        return [
            self._timed(Recipe(), AT_ONCE, dtype_name(next(iter(each.values())).dtype), Layout.of(each), per_site)
            for each in assign_buckets(self._parameters)
        ]

    # -- seconds -------------------------------------------------------------------------------------------------------

    def _bucket(self, recipe: Recipe, stage: Stage, dtype: str, layout: Layout, place: int) -> BucketProfile:
        offering, landing = self._strategy_seconds(recipe, stage, dtype, layout)
        return replace(
            self._timed(recipe, stage, dtype, layout, self.workers if stage.in_lock_step else PAIR),
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
        gossip = isinstance(stage, GossipStage) and stage.in_lock_step
        operations = 1 if gossip else len(trace_ops(recipe, layout, dtype_of(dtype), workers))
        kind = recipe.strategy if gossip else None
        key = (recipe.compressor, kind, dtype, operations, workers)
        if key not in self._codecs:
            self._codecs[key] = _time(dtype, layout, stage if gossip else AT_ONCE, recipe.compressor, workers)
        return self._codecs[key]

    def _strategy_seconds(self, recipe: Recipe, stage: Stage, dtype: str, layout: Layout) -> tuple[float, float]:
        """Seconds of the training thread before and after a round, per entry."""
        if not stage.scheduled or isinstance(stage, GossipStage) or not stage.in_lock_step:
            return 0.0, 0.0
        kind = (type(recipe.strategy), stage.local_parameters)
        if kind not in self._passing:
            sample = _shrunk(layout)
            seconds = time_codec(dtype, sample, stage, Dense(), self.workers)
            self._passing[kind] = tuple(
                seconds[name] / max(1, sample.numel) for name in ("offering_seconds", "landing_seconds")
            )
        return self._passing[kind]


def _time(dtype: str, layout: Layout, stage: Stage, compressor: Compressor, workers: int) -> _Codec:
    sample = _shrunk(layout)
    seconds = time_codec(dtype, sample, stage, compressor, workers)
    entries = max(1, sample.numel)  # a bucket of empty parameters has none
    return _Codec(
        computing=[each / entries for each in seconds["computing_seconds"]],
        engine=[each / entries for each in seconds["engine_seconds"]],
    )


def _shrunk(layout: Layout, most: int = MOST_TIMED) -> Layout:
    """The same tensors with fewer rows, if they have more than `most` entries together."""
    share = min(1.0, most / max(1, layout.numel))
    return Layout.of({slot.name: _fewer_rows(slot.shape, share) for slot in layout})


def _fewer_rows(shape: Sequence[int], share: float) -> tuple[int, ...]:
    return (ceil(shape[0] * share), *shape[1:]) if len(shape) and prod(shape) else tuple(shape)


# -- candidates --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Estimate for a recipe. Seconds and bytes are of one optimizer step, averaged over a period."""

    recipe: str  # as a user writes it
    step_seconds: float = 0.0
    interval: ForecastInterval | None = None  # prediction interval of the measured step_seconds
    bytes_sent: float = 0.0  # per worker
    memory_bytes: int = 0  # state between steps per worker, without model and optimizer
    passes: int = 1  # backward passes (batches) of a worker per step
    rounds: float = 0.0  # communication rounds per backward pass
    strategy_passes: float = 1.0  # backward passes to a loss over Dense()'s: a prior, corrected by the race
    compressor_passes: float = 1.0  # the same for the compressor; both multiply
    source: str = ""  # of the priors
    excluded: str | None = None  # why it is excluded; then step_seconds is 0 if it was not priced

    @property
    def pass_seconds(self) -> float:
        """Seconds per batch of a worker, to compare recipes with different numbers of batches per step."""
        return self.step_seconds / self.passes

    @property
    def expected_passes(self) -> float:
        """Backward passes to a loss, relative to Dense()'s."""
        return self.strategy_passes * self.compressor_passes

    @property
    def expected_steps(self) -> float:
        """Optimizer steps to a loss, relative to Dense()'s, which have one backward pass each."""
        return self.expected_passes / self.passes

    @property
    def expected_seconds(self) -> float:
        """Seconds to a loss for which Dense() needs one step: the order of candidates."""
        return self.step_seconds * self.expected_steps


Progress = Callable[[int, int, str], None]  # priced candidates, all candidates, the next recipe


def _ignore_progress(done: int, of: int, recipe: str) -> None:
    """Default for `on_progress`."""


def estimate_all(
    candidates: Sequence[Candidate],
    profile: WorkloadProfile,
    network: Network,
    workers: int,
    on_progress: Progress = _ignore_progress,
    *,
    pricer: StepPricer | None = None,
) -> list[Prediction]:
    """Price every candidate, in their order; excluded ones are kept without a price.

    Args:
        candidates: to price.
        profile: of the script with `resolve(None)`, lock step without compression; all others are derived from it and
            from codecs that are timed here.
        network: of the workers.
        workers: their number.
        on_progress: called before each candidate.
        pricer: for this profile, to reuse its timings.
    """
    pricer = pricer or StepPricer(profile, workers)
    found: list[Prediction] = []
    for done, candidate in enumerate(candidates):
        on_progress(done, len(candidates), candidate.recipe)
        known = Prediction(
            recipe=candidate.recipe,
            strategy_passes=candidate.strategy_passes,
            compressor_passes=candidate.compressor_passes,
            source=candidate.source,
            excluded=candidate.excluded,
        )
        found.append(known if known.excluded else _priced(known, pricer, network))
    return found


def _priced(known: Prediction, pricer: StepPricer, network: Network) -> Prediction:
    recipe = resolve(known.recipe, pricer.workers)
    try:
        seconds, traffic = pricer.seconds(recipe, network), pricer.traffic(recipe)
        interval = pricer.step_time(recipe, network).interval if is_predictable(recipe) else None
    except GossamerError as error:
        return replace(known, excluded=f"it could not be priced: {error}")
    schedule = recipe.strategy.steady_stage.schedule
    operations = max((len(bucket) for bucket in traffic.buckets), default=0)
    return replace(
        known,
        step_seconds=seconds,
        interval=interval,
        bytes_sent=traffic.bytes_sent,
        memory_bytes=traffic.memory_bytes,
        passes=traffic.passes // traffic.steps,
        rounds=operations * len(schedule.period_rounds) / schedule.period,
    )


# -- selection for a trial ---------------------------------------------------------------------------------------------


HALF = "Dense(dtype='bfloat16')"
LEAST_GAIN = 0.1  # minimum saving of a pass's seconds
MOST_BEHIND = 3.0  # times the best's expected seconds: the possible error of the prior
MOST_OF_A_KIND = 2  # maximum per pair of strategy and compressor, with any parameters
MEMORY_SHARE = 0.5  # fraction of a machine's memory for the state of recipes

WRAPPERS = ("Feedback", "Hierarchical", "Rotated", "Route", "Sharded", "SparseSum", "Warmup")

Reason = Callable[[Prediction], str | None]


def survivors(predicted: Sequence[Prediction], statistics: GradientStatistics | None, most: int) -> list[Prediction]:
    """At most `most` candidates to try: Dense() first, then by expected seconds. See `judged` for the others."""
    return [each for each in judged(predicted, statistics, most) if each.excluded is None]


def judged(
    predicted: Sequence[Prediction],
    statistics: GradientStatistics | None,
    most: int,
    memory_limit_bytes: float | None = None,
) -> list[Prediction]:
    """All candidates: first those to try, Dense() and then by expected seconds; then excluded ones with reasons.

    statistics: used by candidates() to exclude some already; None without any. memory_limit_bytes: limit of one
    worker's state without its model; None for half of this machine's memory.
    """
    limit = system.memory_bytes() * MEMORY_SHARE if memory_limit_bytes is None else memory_limit_bytes
    left, out = _split(predicted, partial(_too_large, limit=limit))
    left, slow = _split(left, _gain(left))
    left, dominated = _split(left, partial(_dominated, others=left))
    left, late = _split(left, _behind(left))
    ordered = sorted(left, key=lambda each: (each.recipe != DENSE, each.expected_seconds))
    tried, later = _first(ordered, most)
    return [*tried, *later, *late, *dominated, *slow, *out]


def _split(predicted: Iterable[Prediction], reason: Reason) -> tuple[list[Prediction], list[Prediction]]:
    """Candidates that remain, and those excluded before or now. Dense() remains: it is the baseline."""
    stay: list[Prediction] = []
    out: list[Prediction] = []
    for each in predicted:
        why = each.excluded or (None if each.recipe == DENSE else reason(each))
        (out if why else stay).append(replace(each, excluded=why))
    return stay, out


def _too_large(each: Prediction, limit: float) -> str | None:
    if each.memory_bytes <= limit:
        return None
    return (
        f"its state would need {bytes_text(each.memory_bytes)} without the model, and {bytes_text(limit)} are available"
    )


def _gain(predicted: Sequence[Prediction]) -> Reason:
    """Reason to exclude a recipe that is too slow compared with Dense(), or with half precision if that is faster."""
    seconds = {each.recipe: each.pass_seconds for each in predicted}
    dense = seconds[DENSE]
    half = seconds.get(HALF, dense)
    lossless, best = (HALF, half) if half < (1 - LEAST_GAIN) * dense else (DENSE, dense)

    def reason(each: Prediction) -> str | None:
        than, name = (dense, DENSE) if each.recipe == HALF else (best, lossless)
        if each.pass_seconds < (1 - LEAST_GAIN) * than:
            return None
        return (
            f"a backward pass takes {seconds_text(each.pass_seconds)} with it and {seconds_text(than)} with {name}: "
            f"less than {LEAST_GAIN:.0%} saved"
        )

    return reason


def _dominated(each: Prediction, others: Sequence[Prediction]) -> str | None:
    """Reason to exclude a recipe: another one is as fast, and its strategy and compressor lose no more."""
    for other in others:
        if _beats(other, each):
            return (
                f"{other.recipe} takes {seconds_text(other.pass_seconds)} for a backward pass, this one "
                f"{seconds_text(each.pass_seconds)}, and it is expected to lose no less"
            )
    return None


def _beats(one: Prediction, other: Prediction) -> bool:
    """A partial order: a better strategy with a worse compressor is neither better nor worse."""
    own, remote = ((each.pass_seconds, each.strategy_passes, each.compressor_passes) for each in (one, other))
    return own != remote and all(a <= b for a, b in zip(own, remote, strict=True))


def _behind(predicted: Sequence[Prediction]) -> Reason:
    """Reason to exclude a recipe that is slower by more than a prior's possible error."""
    best = min(predicted, key=lambda each: each.expected_seconds)

    def reason(each: Prediction) -> str | None:
        times = each.expected_seconds / best.expected_seconds
        if times <= MOST_BEHIND:
            return None
        return f"expected time to a loss is {times:.1f}x that of {best.recipe}, so it is not tried"

    return reason


def _first(ordered: Sequence[Prediction], most: int) -> tuple[list[Prediction], list[Prediction]]:
    tried: list[Prediction] = []
    late: list[Prediction] = []
    kinds: Counter[str] = Counter()
    for each in ordered:
        kind = kind_of(each.recipe)
        why = None
        if kinds[kind] >= MOST_OF_A_KIND:
            why = f"{MOST_OF_A_KIND} recipes of its kind, {kind}, are expected to reach a loss sooner"
        elif len(tried) >= most:
            why = f"{most} recipes are expected to reach a loss sooner, the maximum to try"
        kinds[kind] += why is None
        (late if why else tried).append(replace(each, excluded=why))
    return tried, late


def kind_of(recipe: str) -> str:
    """Names of a recipe's terms without parameters and wrappers: "LocalSGD + TopK + Complete"."""
    resolved = resolve(recipe)
    names = [type(term).__name__ for term in resolved.compressor.held()]
    compressor = next((name for name in names if name not in WRAPPERS), names[0])
    return " + ".join((type(resolved.strategy).__name__, compressor, type(resolved.topology).__name__))
