"""Candidates: recipes of the whole grammar, and why some of them are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.algorithms.strategies import AveragingStage
from gossamer.base.layout import Layout, dtype_of
from gossamer.comm.network import Network
from gossamer.comm.network.cost.cheapest_collective import ranks_per_site
from gossamer.errors import AttachError, RecipeError
from gossamer.events import Attached
from gossamer.plan.advise.pricing import expected_steps as prior
from gossamer.plan.advise.pricing.expected_steps import LossGap
from gossamer.plan.profiling.gradient_statistics import (
    NOISE_LARGEST_HUNDREDTH,
    RANKS,
    GradientStatistics,
)
from gossamer.train.engine.bucket import assign_fragments

DENSE = "Dense()"
ACCUMULATES = (2, 4, 8)
SITE_PERIODS = (4, 16)
BETWEEN_NODES = ("Int8()", "Float4()", "TopK(density=0.01)", "PowerSGD(rank=4)")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One recipe that could be tried, and how many more backward passes it is expected to need than Dense()."""

    recipe: str  # as one would write it
    strategy_passes: float = 1.0  # for what its strategy loses, over Dense()'s
    compressor_passes: float = 1.0  # likewise its compressor
    source: str = ""  # of these two
    excluded: str | None = None  # why it is left out, before anything is priced


def candidates(
    model: Attached,
    optimizer_type: type[Optimizer],
    statistics: GradientStatistics | None,
    workers: int,
    network: Network,
) -> list[Candidate]:
    """Every recipe worth a price, Dense() first, and those that are left out with the reason.

    model: as the script attaches it with any recipe, for the shapes of its parameters. optimizer_type: the script's.
    statistics: None where none were taken; nothing is then left out for them. network: whose sites recipes may use.
    Two texts that resolve to one recipe are one candidate.
    """
    found: dict[str, Candidate] = {}
    parameters = parameters_of(model)
    for drawn in _drawn(optimizer_type, statistics, workers, ranks_per_site(network)):
        try:
            recipe = resolve(drawn.recipe, workers)
            _check(recipe, parameters, optimizer_type, workers)
        except (RecipeError, AttachError) as error:
            found[drawn.recipe] = replace(drawn, excluded=str(error))
            continue
        found.setdefault(repr(recipe), drawn)
    return [each for each in found.values() if workers > 1 or each.recipe == DENSE]


def parameters_of(model: Attached) -> dict[str, Parameter]:
    """A model's parameters on the meta device, in about its own order: buckets begin with the last ones."""
    slots = [(dtype_of(dtype), slot) for dtype, layout in model.layouts for slot in layout]
    return {
        slot.name: Parameter(torch.empty(slot.shape, dtype=dtype, device="meta"), requires_grad=dtype.is_floating_point)
        for dtype, slot in reversed(slots)
    }


# -- the grammar -------------------------------------------------------------------------------------------------------


def _drawn(
    optimizer_type: type[Optimizer], statistics: GradientStatistics | None, workers: int, per_site: int
) -> Iterator[Candidate]:
    """All pairs of a strategy and a compressor for what it sends."""

    def drawn(strategy: str, loss: LossGap, compressor: str, gap: LossGap, topology: str = "") -> Candidate:
        terms = [strategy, compressor if compressor != DENSE else "", topology]
        return Candidate(
            recipe=" + ".join(filter(None, terms)) or DENSE,
            strategy_passes=loss.passes(optimizer_type),
            compressor_passes=gap.passes(optimizer_type, prior.gap_share(compressor, statistics)),
            source=", ".join(dict.fromkeys(each.source for each in (loss, gap))),
            excluded=why_hopeless(compressor, statistics),
        )

    for compressor, gap in prior.EVERY_STEP.items():
        yield drawn("", prior.NOTHING, compressor, gap)
    for compressor, gap in (prior.FEW_BITS | prior.FEW_ENTRIES | prior.LOW_RANK).items():
        yield drawn("EveryStep(delay=1)", prior.DELAYED, compressor, gap)
        for count in ACCUMULATES:
            passes = count * (statistics.steps_ratio(count * workers, than=workers) if statistics else 1.0)
            yield replace(
                drawn(f"EveryStep(accumulate={count})", prior.NOTHING, compressor, gap), strategy_passes=passes
            )
    for strategy, loss in prior.LOCAL_STEPS.items():
        for compressor, gap in prior.DIFFERENCES.items():
            yield replace(drawn(strategy, loss, compressor, gap), excluded=None)
    for strategy, loss in prior.GOSSIP.items():
        for topology in ("Ring()", "Exponential()", "Exponential(one_peer=True)", "RandomPeers(count=1)"):
            for compressor, gap in prior.LETTERS.items():
                yield replace(drawn(strategy, loss, compressor, gap, topology), excluded=None)
    if per_site:
        yield from _on_sites(drawn, per_site)


def _on_sites(drawn: Callable[..., Candidate], per_site: int) -> Iterator[Candidate]:
    """Within a site everything travels, between sites less."""
    yield drawn("", prior.NOTHING, DENSE, prior.NOTHING, f"Hierarchy(per_node={per_site})")
    for compressor in BETWEEN_NODES:
        there = drawn("", prior.NOTHING, compressor, prior.EVERY_STEP[compressor])
        yield replace(there, recipe=f"Hierarchy(per_node={per_site}, between={compressor})")
    for period in SITE_PERIODS:
        for compressor, gap in prior.DIFFERENCES.items():
            strategy = f"LocalSGD(period={period}, per_site={per_site})"
            yield replace(drawn(strategy, prior.SITES, compressor, gap), excluded=None)


# -- what is left out --------------------------------------------------------------------------------------------------


def why_hopeless(compressor: str, statistics: GradientStatistics | None) -> str | None:
    """Why a choice finds no more in these gradients than it would in noise; None where it does, or nothing is known."""
    if statistics is None:
        return None
    if compressor in prior.FEW_ENTRIES and statistics.largest_hundredth < prior.SPARSER * NOISE_LARGEST_HUNDREDTH:
        return (
            f"the largest hundredth of the entries holds {statistics.largest_hundredth:.0%} of a gradient's energy, "
            f"and that of noise would hold {NOISE_LARGEST_HUNDREDTH:.0%}: few entries tell next to nothing of it"
        )
    if compressor not in prior.LOW_RANK or statistics.singular_shares is None:
        return None
    place = RANKS.index(prior.rank_of(compressor))
    kept, noise = statistics.singular_shares[place], (statistics.noise_singular_shares or (0.0,) * len(RANKS))[place]
    if prior.beyond_noise(kept, noise):
        return None
    return (
        f"the first {RANKS[place]} singular directions hold {kept:.0%} of the gradients' energy, and of noise in such "
        f"matrices up to {noise:.0%}: thin factors tell next to nothing of them"
    )


def _check(recipe: Recipe, parameters: Mapping[str, Parameter], optimizer_type: type[Optimizer], workers: int) -> None:
    """Raise AttachError where a session would refuse it for this model, optimizer or number of workers."""
    stage = recipe.strategy.steady_stage
    if isinstance(stage, AveragingStage) and stage.per_site is not None:
        stage.site_size(workers)
    if stage.schedule.fragments > 1:
        assign_fragments(parameters, stage.schedule.fragments)
    for slot in Layout.of(parameters):
        owner = recipe.compressor.owns_momentum(slot)
        if owner is not None and not issubclass(optimizer_type, owner.optimizers):
            known = " or ".join(each.__name__ for each in owner.optimizers)
            raise AttachError(
                f"it does a part of the work of {known}, and this script trains with {optimizer_type.__name__}"
            )
