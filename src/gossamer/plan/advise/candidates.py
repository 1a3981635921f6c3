"""Candidates: recipes of the whole grammar, the reasons to exclude some, and a prior of the loss that each costs.

A prior is the loss of a recipe minus that of Dense() after the same number of steps. Divided by the loss that a
training gains when it becomes longer by a factor of e, it is the logarithm of the factor by which the training would
have to be longer. Factors of strategies and compressors multiply. Priors only order the candidates for a race, and the
race's measurements replace them. They are no retained benefit: those that do not come from docs/benchmarks/ladder.md
were measured at the learning rate of Dense(), not at the recipe's own.

source: docs/benchmarks/compressors.md ("bytelm-adamw", "bytelm", 100 steps, training loss; "AdamW"),
        docs/benchmarks/ladder.md (bytelm-57k-b2, 2221 steps, held out, AdamW, each at its own learning rate),
        docs/benchmarks/local.md (1000 steps, held out, AdamW at 0.001; "conclusions"). All of the small byte model: on
        another model the order may differ. Values marked ASSUMED are between measured ones, or come from trainings of
        200 steps with one seed, which are too short to rank recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log, sqrt

import torch
from torch.nn import Parameter
from torch.optim import SGD, Optimizer

from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.algorithms.strategies import ALIGN, AveragingStage
from gossamer.base.layout import Layout, dtype_of
from gossamer.comm.network import Network
from gossamer.comm.network.cost.cheapest_collective import ranks_per_site
from gossamer.errors import AttachError, RecipeError
from gossamer.events import Attached
from gossamer.plan.profile.gradient_statistics import (
    NOISE_LARGEST_HUNDREDTH,
    RANKS,
    GradientStatistics,
)
from gossamer.train.engine.bucket import assign_fragments
from gossamer.train.moments.aligned_moment import ALIGNABLE

# -- expected loss of a recipe -----------------------------------------------------------------------------------------


#: Nats that Dense() gains from 50 to 100 steps, over ln 2: docs/benchmarks/compressors.md, bytelm-adamw and bytelm.
ADAM_NATS_PER_E_FOLD = (2.911 - 2.659) / log(2)
SGD_NATS_PER_E_FOLD = (2.790 - 2.638) / log(2)

COMPRESSORS, LOCAL, LADDER = "docs/benchmarks/compressors.md", "docs/benchmarks/local.md", "docs/benchmarks/ladder.md"
ASSUMED = "assumed, only to order candidates for a race"


@dataclass(frozen=True)
class LossGap:
    """Final loss minus that of Dense(), in nats, and where it was measured."""

    adam: float
    sgd: float
    source: str

    def passes(self, optimizer_type: type[Optimizer], share: float = 1.0) -> float:
        """Backward passes to a loss over Dense()'s, for a `share` of this gap. Other optimizers count as Adam."""
        if issubclass(optimizer_type, SGD):
            return exp(share * self.sgd / SGD_NATS_PER_E_FOLD)
        return exp(share * self.adam / ADAM_NATS_PER_E_FOLD)


NOTHING = LossGap(0.0, 0.0, COMPRESSORS)

FEW_BITS = {
    "Dense()": NOTHING,
    "Dense(dtype='bfloat16')": NOTHING,
    "Int8()": NOTHING,
    "QSGD()": LossGap(0.005, 0.0, COMPRESSORS),
    "Rotated(Float4(), by='hadamard')": LossGap(0.007, 0.0, ASSUMED),
    "Float4()": LossGap(0.011, 0.0, COMPRESSORS),
    "SignMagnitude()": LossGap(0.127, 0.272, COMPRESSORS),
    "SignMagnitude(feedback=False)": LossGap(0.053, 0.066, COMPRESSORS),
    "TwoBit(adaptive=True)": LossGap(0.302, 0.476, COMPRESSORS),
    "TwoBit(adaptive=True, feedback=False)": LossGap(0.116, 0.286, COMPRESSORS),
    "TernGrad()": LossGap(0.311, 0.072, COMPRESSORS),
    "OneBit()": LossGap(0.264, 0.398, COMPRESSORS),
    "OneBit(feedback=False)": LossGap(0.124, 0.243, COMPRESSORS),
}

FEW_ENTRIES = {
    "TopK(density=0.1)": LossGap(0.126, 0.024, COMPRESSORS),
    "TopK(density=0.03)": LossGap(0.266, 0.051, COMPRESSORS),
    "TopK(density=0.01)": LossGap(0.409, 0.079, COMPRESSORS),
    "TopK(density=0.003)": LossGap(0.57, 0.19, ASSUMED),
    "TopK(density=0.001)": LossGap(0.71, 0.31, ASSUMED),
    "Feedback(TopK(density=0.01), rule='ef21')": LossGap(0.45, 0.1, ASSUMED),
    "Chain(TopK(density=0.1), Int8())": LossGap(0.126, 0.024, ASSUMED),
    "Chain(TopK(density=0.03), Int8())": LossGap(0.265, 0.051, COMPRESSORS),
    "Chain(TopK(density=0.01), Int8())": LossGap(0.408, 0.078, COMPRESSORS),
    "Chain(TopK(density=0.01), SignMagnitude())": LossGap(0.42, 0.09, ASSUMED),
    "Warmup(TopK(density=0.01))": LossGap(0.258, 0.106, COMPRESSORS),
    "SharedMask(density=0.01)": LossGap(0.5, 0.2, ASSUMED),
    "ARCTopK(density=0.01)": LossGap(0.5, 0.2, ASSUMED),
    "RandomK(density=0.1)": LossGap(0.6, 0.2, ASSUMED),
    "RandomK(density=0.01)": LossGap(1.339, 0.466, COMPRESSORS),
}

LOW_RANK = {
    "PowerSGD(rank=8)": LossGap(0.03, 0.006, ASSUMED),
    "PowerSGD(rank=4)": LossGap(0.086, 0.017, COMPRESSORS),
    "PowerSGD(rank=2)": LossGap(0.145, 0.029, ASSUMED),
    "PowerSGD(rank=1)": LossGap(0.2, 0.04, ASSUMED),
}

_DEMO_IN_BITS = "DeMo(Route(Rotated(Chain(TopK(density={}), SignMagnitude())), rest=Float4(feedback=False)))"
_UPDATE_IN_BITS = "Route(AdamUpdate(Chain(TopK(density={}), SignMagnitude())), rest=Feedback(Sharded(Float4())))"
OPTIMIZER_PARTS = {  # compressors that do a part of the optimizer's work; others would need their own learning rates
    "DGC(density=0.01)": LossGap(0.0, 0.099, COMPRESSORS),
    "DGC(density=0.001)": LossGap(0.0, 0.3, ASSUMED),
    "OneBitAdam(warmup=40)": LossGap(0.026, 0.0, COMPRESSORS),
    "OneBitAdam(warmup=40, inner=TopK(density=0.01))": LossGap(0.153, 0.0, COMPRESSORS),
    "CompressedAdam(TopK(density=0.01))": LossGap(0.2, 0.0, ASSUMED),
    "MicroAdam(TopK(density=0.01))": LossGap(0.3, 0.0, ASSUMED),
    "AdamUpdate(Float4())": LossGap(0.038, 0.0, ASSUMED),
    "AdamUpdate(OneBit())": LossGap(0.131, 0.0, ASSUMED),
    "AdamUpdate(TopK(density=0.01))": LossGap(0.132, 0.0, ASSUMED),
    "DeMo()": LossGap(0.041, 0.1, ASSUMED),
    "DeMo(TopK(density=0.01))": LossGap(0.138, 0.2, ASSUMED),
    "DeMo(Rotated(TopK(density=0.001)))": LossGap(0.228, 0.3, ASSUMED),
    _DEMO_IN_BITS.format(0.01): LossGap(0.037, 0.1, ASSUMED),
    _DEMO_IN_BITS.format(0.003): LossGap(0.146, 0.2, ASSUMED),
    _UPDATE_IN_BITS.format(0.01): LossGap(0.133, 0.0, ASSUMED),
}

EVERY_STEP = FEW_BITS | FEW_ENTRIES | LOW_RANK | OPTIMIZER_PARTS

_ONE_BIT_AND_REST = "Route(Feedback(Sharded(OneBit())), rest=Feedback(Sharded(Float4())))"
DIFFERENCES = {  # compressors of parameter differences after local steps
    "Dense()": LossGap(0.0, 0.0, LOCAL),
    "Dense(dtype='bfloat16')": LossGap(0.0, 0.0, ASSUMED),
    "Int8()": LossGap(0.0, 0.0, LOCAL),
    "Float4()": LossGap(0.011, 0.011, LOCAL),
    "OneBit()": LossGap(0.034, 0.034, LOCAL),
    _ONE_BIT_AND_REST: LossGap(0.034, 0.034, LOCAL),
    "TwoBit(adaptive=True)": LossGap(0.093, 0.093, LOCAL),
    "TopK(density=0.03)": LossGap(0.102, 0.102, LOCAL),
    "Chain(TopK(density=0.05), SignMagnitude())": LossGap(0.159, 0.159, LOCAL),
}
LETTERS = {  # compressors of differences to public copies, for neighbors
    "Dense()": NOTHING,
    "Int8()": LossGap(0.0, 0.0, ASSUMED),
    "Float4()": LossGap(0.02, 0.02, ASSUMED),
    "TopK(density=0.1)": LossGap(0.1, 0.1, ASSUMED),
}

_OUTER = "outer_learning_rate=1.0, outer_momentum=0.5"
LOCAL_STEPS = {  # strategies with local steps
    "LocalSGD(period=2, optimizer_state='align')": LossGap(0.0, 0.0, LADDER),
    "LocalSGD(period=4, optimizer_state='align')": LossGap(0.007, 0.007, LADDER),
    "LocalSGD(period=8, optimizer_state='align')": LossGap(0.047, 0.047, LADDER),
    "LocalSGD(period=2)": LossGap(0.015, 0.1, ASSUMED),
    "LocalSGD(period=4)": LossGap(0.03, 0.1, LADDER),
    "LocalSGD(period=8)": LossGap(0.056, 0.11, LADDER),
    "LocalSGD(period=16)": LossGap(0.12, 0.12, ASSUMED),
    "PostLocalSGD(period=4, start=100)": LossGap(0.14, 0.08, ASSUMED),
    "PostLocalSGD(period=16, start=100)": LossGap(0.16, 0.1, ASSUMED),
    f"DiLoCo(period=10, {_OUTER})": LossGap(0.06, 0.06, ASSUMED),
    f"DiLoCo(period=20, {_OUTER})": LossGap(0.08, 0.066, LADDER),
    f"DiLoCo(period=50, {_OUTER})": LossGap(0.181, 0.181, LOCAL),
    f"DiLoCo(period=100, {_OUTER})": LossGap(0.289, 0.289, LOCAL),
    f"DiLoCo(period=20, {_OUTER}, fragments=4, delay=4)": LossGap(0.08, 0.08, ASSUMED),
    f"DiLoCo(period=50, {_OUTER}, fragments=4, delay=5)": LossGap(0.19, 0.19, ASSUMED),
    "DelayedAveraging(delay=2)": LossGap(0.178, 0.1, ASSUMED),
    "DelayedAveraging(delay=4)": LossGap(0.178, 0.1, LOCAL),
    "DelayedAveraging(delay=8, period=4)": LossGap(0.19, 0.12, ASSUMED),
}
GOSSIP = {
    "Gossip()": LossGap(0.178, 0.12, ASSUMED),
    "Gossip(period=4)": LossGap(0.19, 0.13, ASSUMED),
}
SITES = LossGap(0.084, 0.05, ASSUMED)  # LocalSGD(per_site=...): half of LocalSGD's
DELAYED = LossGap(0.03, 0.03, ASSUMED)  # EveryStep(delay=1)

# -- adjustment by gradient statistics ---------------------------------------------------------------------------------

#: Shares of energy in gradients of the small byte model, with which the gaps above were measured: in the largest 1 %
#: and 0.1 % of the entries, and in the first 1, 2, 4, 8 directions. Eight batches of one worker with AdamW at 0.001,
#: means of values after 50 steps (0.564, 0.203; 0.61, 0.95, 0.98, 0.99) and after 100.
REFERENCE_LARGEST = (0.571, 0.207)
REFERENCE_SINGULAR = (0.68, 0.91, 0.97, 0.985)
SPARSER, LESS_RANK = 1.5, 1.5  # times the value of noise; below it a selection is no better than chance
MOST_CHANGE = 1.5  # of a gap by statistics


def gap_share(compressor: str, statistics: GradientStatistics | None) -> float:
    """Share of a compressor's measured gap to expect: the ratio of the relative norms that one message loses.

    sqrt((1 - kept) / (1 - kept of the model that it was measured with)), for sparsification and low rank.
    """
    if statistics is None:
        return 1.0
    if compressor in FEW_ENTRIES:
        thin = "0.001" in compressor or "0.003" in compressor
        kept, reference = (
            (statistics.largest_thousandth, REFERENCE_LARGEST[1])
            if thin
            else (statistics.largest_hundredth, REFERENCE_LARGEST[0])
        )
    elif compressor in LOW_RANK and statistics.singular_shares is not None:
        place = RANKS.index(rank_of(compressor))
        kept, reference = statistics.singular_shares[place], REFERENCE_SINGULAR[place]
    else:
        return 1.0
    return min(MOST_CHANGE, sqrt((1 - kept) / (1 - reference)))


def beyond_noise(kept: float, noise: float) -> bool:
    """Whether some directions have more energy than in noise, where it is at most `noise`."""
    return kept >= min(LESS_RANK * noise, (1 + noise) / 2)


def rank_of(compressor: str) -> int:
    return int(compressor.removeprefix("PowerSGD(rank=").removesuffix(")"))


# -- candidates --------------------------------------------------------------------------------------------------------


DENSE = "Dense()"
ACCUMULATES = (2, 4, 8)
SITE_PERIODS = (4, 16)
BETWEEN_NODES = ("Int8()", "Float4()", "TopK(density=0.01)", "PowerSGD(rank=4)")


WITHOUT_WAITING = {  # for workers of unequal speeds
    "AsyncDiLoCo(period=24)": LossGap(0.12, 0.12, ASSUMED),
    "ParameterServer(mode='async')": LossGap(0.06, 0.06, ASSUMED),
    "Gossip(mixing='pairwise')": LossGap(0.178, 0.12, ASSUMED),
}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A candidate recipe, with a prior of its backward passes relative to Dense()."""

    recipe: str  # as a user writes it
    strategy_passes: float = 1.0  # prior for its strategy, relative to Dense()
    compressor_passes: float = 1.0  # prior for its compressor, relative to Dense()
    source: str = ""  # of the priors
    excluded: str | None = None  # reason to exclude it before pricing


def candidates(
    model: Attached,
    optimizer_type: type[Optimizer],
    statistics: GradientStatistics | None,
    workers: int,
    network: Network,
    speeds: Sequence[float] = (),
    batch: int = 1,
) -> list[Candidate]:
    """All candidates, Dense() first, and the excluded ones with their reasons.

    Args:
        model: as attached by the script with any recipe, for the shapes of its parameters.
        optimizer_type: the script's.
        statistics: of the gradients; None to exclude no candidate because of them.
        workers: their number.
        network: recipes may use its sites.
        speeds: of the workers, by rank; if they differ, recipes may divide the work by speed.
        batch: samples of a worker's batch, for the global batch of such a recipe.

    Returns:
        One candidate for each resolved recipe, also if several texts resolve to it.
    """
    found: dict[str, Candidate] = {}
    parameters = parameters_of(model)
    for drawn in _drawn(optimizer_type, statistics, workers, ranks_per_site(network), speeds, batch):
        try:
            recipe = resolve(drawn.recipe, workers)
            _check(recipe, parameters, optimizer_type, workers)
        except (RecipeError, AttachError) as error:
            found[drawn.recipe] = replace(drawn, excluded=str(error))
            continue
        found.setdefault(repr(recipe), drawn)
    return [each for each in found.values() if workers > 1 or each.recipe == DENSE]


def parameters_of(model: Attached) -> dict[str, Parameter]:
    """A model's parameters on the meta device, in approximately its own order: buckets begin with the last ones."""
    slots = [(dtype_of(dtype), slot) for dtype, layout in model.layouts for slot in layout]
    return {
        slot.name: Parameter(torch.empty(slot.shape, dtype=dtype, device="meta"), requires_grad=dtype.is_floating_point)
        for dtype, slot in reversed(slots)
    }


# -- the grammar -------------------------------------------------------------------------------------------------------


def _drawn(
    optimizer_type: type[Optimizer],
    statistics: GradientStatistics | None,
    workers: int,
    per_site: int,
    speeds: Sequence[float],
    batch: int,
) -> Iterator[Candidate]:
    """All pairs of a strategy and a compressor."""

    def drawn(strategy: str, loss: LossGap, compressor: str, gap: LossGap, topology: str = "") -> Candidate:
        terms = [strategy, compressor if compressor != DENSE else "", topology]
        return Candidate(
            recipe=" + ".join(filter(None, terms)) or DENSE,
            strategy_passes=loss.passes(optimizer_type),
            compressor_passes=gap.passes(optimizer_type, gap_share(compressor, statistics)),
            source=", ".join(dict.fromkeys(each.source for each in (loss, gap))),
            excluded=why_hopeless(compressor, statistics),
        )

    for compressor, gap in EVERY_STEP.items():
        yield drawn("", NOTHING, compressor, gap)
    for compressor, gap in (FEW_BITS | FEW_ENTRIES | LOW_RANK).items():
        yield drawn("EveryStep(delay=1)", DELAYED, compressor, gap)
        for count in ACCUMULATES:
            accumulated = drawn(f"EveryStep(accumulate={count})", NOTHING, compressor, gap)
            yield replace(accumulated, strategy_passes=_passes_of_larger_steps(statistics, count, workers))
    for strategy, loss in LOCAL_STEPS.items():
        for compressor, gap in DIFFERENCES.items():
            yield replace(drawn(strategy, loss, compressor, gap), excluded=None)
    for strategy, loss in GOSSIP.items():
        for topology in ("Ring()", "Exponential()", "Exponential(one_peer=True)", "RandomPeers(count=1)"):
            for compressor, gap in LETTERS.items():
                yield replace(drawn(strategy, loss, compressor, gap, topology), excluded=None)
    if per_site:
        yield from _on_sites(drawn, per_site)
    if len(set(speeds)) > 1:
        yield from _by_speed(drawn, statistics, speeds, batch)


def _on_sites(drawn: Callable[..., Candidate], per_site: int) -> Iterator[Candidate]:
    """Dense within a site, compressed between sites."""
    yield drawn("", NOTHING, DENSE, NOTHING, f"Hierarchy(per_node={per_site})")
    for compressor in BETWEEN_NODES:
        there = drawn("", NOTHING, compressor, EVERY_STEP[compressor])
        yield replace(there, recipe=f"Hierarchy(per_node={per_site}, between={compressor})")
    for period in SITE_PERIODS:
        for compressor, gap in DIFFERENCES.items():
            strategy = f"LocalSGD(period={period}, per_site={per_site})"
            yield replace(drawn(strategy, SITES, compressor, gap), excluded=None)


def _passes_of_larger_steps(statistics: GradientStatistics | None, count: int, workers: int) -> float:
    """Prior of backward passes to a loss, relative to Dense()'s, of steps with `count` times as many batches."""
    return count * (statistics.steps_ratio(count * workers, than=workers) if statistics else 1.0)


def _by_speed(
    drawn: Callable[..., Candidate], statistics: GradientStatistics | None, speeds: Sequence[float], batch: int
) -> Iterator[Candidate]:
    """Shares of a step, and local steps, in proportion to the workers' speeds."""
    workers, seconds = len(speeds), [1 / speed for speed in speeds]
    for count in ACCUMULATES:
        strategy = f"EveryStep(global_batch={count * workers * batch}, batch={batch}, balance=True)"
        passes = _passes_of_larger_steps(statistics, count, workers)
        for compressor, gap in (FEW_BITS | FEW_ENTRIES | LOW_RANK).items():
            yield replace(drawn(strategy, NOTHING, compressor, gap), strategy_passes=passes)
    for strategy, loss in LOCAL_STEPS.items():
        if not strategy.startswith(("LocalSGD(", "DiLoCo(")):
            continue
        balanced = f"{strategy.removesuffix(')')}, balance=True)"
        steps = resolve(balanced, workers).strategy.steady_stage.parts_at(seconds) or (1,)
        fewer = max(steps) * workers / sum(steps)  # samples of a period with equal steps, over those of this one
        for compressor, gap in DIFFERENCES.items():
            found = drawn(balanced, loss, compressor, gap)
            yield replace(found, strategy_passes=fewer * found.strategy_passes, excluded=None)
    for strategy, loss in WITHOUT_WAITING.items():
        yield drawn(strategy, loss, DENSE, NOTHING)


# -- exclusion ---------------------------------------------------------------------------------------------------------


def why_hopeless(compressor: str, statistics: GradientStatistics | None) -> str | None:
    """Why a selection is no better than in noise for these gradients; None if it is better, or unknown."""
    if statistics is None:
        return None
    if compressor in FEW_ENTRIES and statistics.largest_hundredth < SPARSER * NOISE_LARGEST_HUNDREDTH:
        return (
            f"the largest 1 % of the entries has {statistics.largest_hundredth:.0%} of a gradient's energy, and "
            f"in noise it would have {NOISE_LARGEST_HUNDREDTH:.0%}: sparsification would lose almost all of it"
        )
    if compressor not in LOW_RANK or statistics.singular_shares is None:
        return None
    place = RANKS.index(rank_of(compressor))
    kept, noise = statistics.singular_shares[place], (statistics.noise_singular_shares or (0.0,) * len(RANKS))[place]
    if beyond_noise(kept, noise):
        return None
    return (
        f"the first {RANKS[place]} singular directions have {kept:.0%} of the gradients' energy, and in noise of these "
        f"shapes up to {noise:.0%}: a low-rank approximation would lose almost all of it"
    )


def _check(recipe: Recipe, parameters: Mapping[str, Parameter], optimizer_type: type[Optimizer], workers: int) -> None:
    """Raise AttachError if a session would refuse the recipe for this model, optimizer or number of workers."""
    stage = recipe.strategy.steady_stage
    if isinstance(stage, AveragingStage) and stage.per_site is not None:
        stage.site_size(workers)
    aligns = isinstance(stage, AveragingStage) and stage.strategy.on_merge == ALIGN
    if aligns and not issubclass(optimizer_type, ALIGNABLE):
        raise AttachError(f"it corrects the momentum of Adam and SGD, and this script has {optimizer_type.__name__}")
    if stage.schedule.fragments > 1:
        assign_fragments(parameters, stage.schedule.fragments)
    for slot in Layout.of(parameters):
        owner = recipe.compressor.owns_momentum(slot)
        if owner is not None and not issubclass(optimizer_type, owner.optimizers):
            known = " or ".join(each.__name__ for each in owner.optimizers)
            raise AttachError(f"it replaces a part of {known}, and this script trains with {optimizer_type.__name__}")


# -- findings from gradients -------------------------------------------------------------------------------------------


SIGNS_AGREE = 0.55  # in successive batches; noise alone has 0.5
FREE = 4.0  # times all workers' batches; with more noise, a step of 4x as many replaces 2.5


@dataclass(frozen=True, kw_only=True)
class GradientFinding:
    """Whether a family of recipes suits the gradients, and the numbers as evidence."""

    family: str
    works: bool
    because: str


def findings(statistics: GradientStatistics, workers: int) -> list[GradientFinding]:
    """One finding for each family with statistics: sparsification, low rank, signs, larger batches."""
    found = [_few_entries(statistics), _low_rank(statistics), _signs(statistics), _batches(statistics, workers)]
    return [each for each in found if each is not None]


def _few_entries(statistics: GradientStatistics) -> GradientFinding:
    return GradientFinding(
        family="few entries: TopK and similar",
        works=statistics.largest_hundredth >= SPARSER * NOISE_LARGEST_HUNDREDTH,
        because=f"the largest 1 % of the entries has {statistics.largest_hundredth:.0%} of the energy, and the "
        f"largest 0.1 % {statistics.largest_thousandth:.0%}; in noise it would be {NOISE_LARGEST_HUNDREDTH:.0%} "
        "and 1%",
    )


def _low_rank(statistics: GradientStatistics) -> GradientFinding | None:
    if statistics.singular_shares is None or statistics.noise_singular_shares is None:
        return None
    both = list(zip(statistics.singular_shares, statistics.noise_singular_shares, strict=True))
    shares = ", ".join(f"{kept:.0%} ({noise:.0%})" for kept, noise in both)
    return GradientFinding(
        family="low rank: PowerSGD",
        works=any(beyond_noise(kept, noise) for kept, noise in both),
        because=f"the first {', '.join(map(str, RANKS))} singular directions have {shares} of the energy; in brackets "
        "the upper bound for noise",
    )


def _signs(statistics: GradientStatistics) -> GradientFinding | None:
    if statistics.sign_agreement is None:
        return None
    return GradientFinding(
        family="signs: OneBit and similar",
        works=statistics.sign_agreement >= SIGNS_AGREE,
        because=f"{statistics.sign_agreement:.0%} of the entries have the same sign in successive batches; in noise it "
        "would be 50%",
    )


def _batches(statistics: GradientStatistics, workers: int) -> GradientFinding | None:
    noise = statistics.noise_scale_batches
    if noise is None:
        return None
    size = "too large for these batches to measure" if noise == inf else f"about that of {noise:.2g} batches"
    return GradientFinding(
        family="larger batches: accumulate, and long periods",
        works=noise >= FREE * workers,
        because=f"the gradient noise scale is {size}, and {workers} workers use {workers} batches per step: four "
        f"times as many would need {statistics.steps_ratio(4 * workers, than=workers):.0%} of the steps",
    )
