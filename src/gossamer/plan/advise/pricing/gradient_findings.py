"""Gradient findings: what gradient statistics say of each family of recipes, in a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from gossamer.plan.advise.pricing import expected_steps as prior
from gossamer.plan.profile.gradient_statistics import NOISE_LARGEST_HUNDREDTH, RANKS, GradientStatistics

SIGNS_AGREE = 0.55  # of successive batches: noise alone has 0.5
FREE = 4.0  # times all workers' batches: where the noise scale is beyond, one step of four times as many replaces 2.5


@dataclass(frozen=True, kw_only=True)
class GradientFinding:
    """Whether a family of recipes has something to work with, and the numbers that say so."""

    family: str
    works: bool
    because: str


def findings(statistics: GradientStatistics, workers: int) -> list[GradientFinding]:
    """One for each family that the statistics speak of: few entries, low rank, signs, larger batches."""
    found = [_few_entries(statistics), _low_rank(statistics), _signs(statistics), _batches(statistics, workers)]
    return [each for each in found if each is not None]


def _few_entries(statistics: GradientStatistics) -> GradientFinding:
    return GradientFinding(
        family="few entries: TopK and its kin",
        works=statistics.largest_hundredth >= prior.SPARSER * NOISE_LARGEST_HUNDREDTH,
        because=f"the largest hundredth of the entries holds {statistics.largest_hundredth:.0%} of the energy, and the "
        f"largest thousandth {statistics.largest_thousandth:.0%}; of noise it would be {NOISE_LARGEST_HUNDREDTH:.0%} "
        "and 1%",
    )


def _low_rank(statistics: GradientStatistics) -> GradientFinding | None:
    if statistics.singular_shares is None or statistics.noise_singular_shares is None:
        return None
    both = list(zip(statistics.singular_shares, statistics.noise_singular_shares, strict=True))
    shares = ", ".join(f"{kept:.0%} ({noise:.0%})" for kept, noise in both)
    return GradientFinding(
        family="low rank: PowerSGD",
        works=any(prior.beyond_noise(kept, noise) for kept, noise in both),
        because=f"the first {', '.join(map(str, RANKS))} singular directions hold {shares} of the energy, in brackets "
        "at most what noise would have there",
    )


def _signs(statistics: GradientStatistics) -> GradientFinding | None:
    if statistics.sign_agreement is None:
        return None
    return GradientFinding(
        family="signs: OneBit and its kin",
        works=statistics.sign_agreement >= SIGNS_AGREE,
        because=f"{statistics.sign_agreement:.0%} of the entries have one sign in successive batches; of noise it "
        "would be 50%",
    )


def _batches(statistics: GradientStatistics, workers: int) -> GradientFinding | None:
    noise = statistics.noise_scale_batches
    if noise is None:
        return None
    size = "beyond what these batches could tell" if noise == inf else f"about that of {noise:.2g} batches"
    return GradientFinding(
        family="larger batches: accumulate, and long periods",
        works=noise >= FREE * workers,
        because=f"the gradient noise scale is {size}, and {workers} workers make {workers} batches in a step: four "
        f"times as many would need {statistics.steps_ratio(4 * workers, than=workers):.0%} of the steps",
    )
