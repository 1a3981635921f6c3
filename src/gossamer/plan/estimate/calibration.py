"""Calibration: past pairs of estimated and measured seconds give the prediction interval of an estimate.

Split conformal prediction: if past and future errors are exchangeable, the interval has the stated coverage for any
distribution of errors. An error is a log ratio, divided by the spread of the estimate's own inputs, so that an estimate
from unsteady steps has a wider interval.

    score = log(measured / estimate) / scale,   scale = sqrt(LEAST_SPREAD^2 + spread^2)
    interval = estimate * exp(scale * [the lower, the upper quantile of past scores])

Quantiles are those of similar recipes on similar networks if there are enough pairs, else of similar recipes, else of
all.
source: Vovk, Gammerman & Shafer 2005, Algorithmic Learning in a Random World (split conformal, 4.5: by kind); Lei et
al. 2018, JASA (5.2: scaled by a local spread)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from math import ceil, exp, floor, hypot, isfinite, log
from typing import Any

from gossamer.algorithms.compressors import Dense
from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.algorithms.strategies import GossipStage
from gossamer.base.units import range_text, share_text
from gossamer.comm.network import Network
from gossamer.errors import require

COVERAGE = 0.8
LEAST_SPREAD = 0.2  # of an estimate with constant inputs; it affects the width, hardly the coverage
FAR_SECONDS = 0.005  # of a round trip; beyond it, windows and loss dominate
FILE = "calibration.json"

Kind = tuple[str, ...]  # (), (family,) or (family, network class)


@dataclass(frozen=True, kw_only=True)
class PastForecast:
    """An estimate of a step, and its measured time."""

    recipe: str
    family: str  # see recipe_family
    network: str
    network_class: str  # see network_class
    workers: int
    estimated_seconds: float
    measured_seconds: float
    spread: float = 0.0  # standard deviation of the estimate's logarithm, from its inputs

    def __post_init__(self) -> None:
        for name in ("estimated_seconds", "measured_seconds"):
            value = getattr(self, name)
            require(isfinite(value) and value > 0, f"{name} of a past estimate must be a positive number, got {value}")

    @property
    def score(self) -> float:
        return log(self.measured_seconds / self.estimated_seconds) / scale(self.spread)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Its kinds, the narrowest first."""
        return _kinds(self.family, self.network_class)


@dataclass(frozen=True, kw_only=True)
class ForecastInterval:
    """Interval that contains the measured step time with a probability of `coverage`."""

    low_seconds: float
    high_seconds: float
    coverage: float
    pairs: int  # number of past estimates
    kind: str  # kind of these estimates
    spread: float  # of the estimate's own inputs

    def holds(self, seconds: float) -> bool:
        return self.low_seconds <= seconds <= self.high_seconds

    def __str__(self) -> str:
        """For example: 80 %: 350 to 410 ms."""
        return f"{share_text(self.coverage)}: {range_text(self.low_seconds, self.high_seconds)}"


class Calibration:
    """Past estimates by kind. Raises ValueError if they are too few for an interval.

    provenance: machine, command and commit of the measurements.
    """

    def __init__(self, pairs: Iterable[PastForecast], provenance: Mapping[str, Any] | None = None) -> None:
        self.pairs, self.provenance = tuple(pairs), dict(provenance or {})
        require(
            len(self.pairs) >= fewest_pairs(COVERAGE),
            f"{len(self.pairs)} past estimates are too few for a {COVERAGE:.0%} interval: it takes "
            f"{fewest_pairs(COVERAGE)} at least. Make more: python benchmarks/calibration.py",
        )
        self._scores: dict[Kind, list[float]] = {}
        for pair in self.pairs:
            for kind in pair.kinds:
                self._scores.setdefault(kind, []).append(pair.score)
        for scores in self._scores.values():
            scores.sort()

    def interval(
        self, estimated_seconds: float, family: str, network: str, spread: float = 0.0, coverage: float = COVERAGE
    ) -> ForecastInterval:
        """The interval of an estimate. It always contains the estimate itself, also if past errors had one sign.

        family, network: see recipe_family and network_class.
        """
        kind = next(
            (each for each in _kinds(family, network) if len(self._scores.get(each, ())) >= fewest_pairs(coverage)), ()
        )
        scores, width = self._scores[kind], scale(spread)
        low, high = quantiles(scores, coverage)
        return ForecastInterval(
            low_seconds=estimated_seconds * exp(width * min(0.0, low)),
            high_seconds=estimated_seconds * exp(width * max(0.0, high)),
            coverage=coverage,
            pairs=len(scores),
            kind=", ".join(kind) or "all",
            spread=spread,
        )

    def to_json(self) -> dict[str, Any]:
        return {"provenance": self.provenance, "pairs": [asdict(pair) for pair in self.pairs]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Calibration:
        return cls((PastForecast(**each) for each in fields["pairs"]), fields["provenance"])


def fewest_pairs(coverage: float) -> int:
    """Number of past scores for a two-sided interval with finite ends: 9 for 80 %."""
    return ceil(2 / (1 - coverage) - 1 - 1e-9)


def quantiles(scores: list[float], coverage: float) -> tuple[float, float]:
    """Ends that contain one more score with a probability of at least `coverage`. scores: ascending.

    Of n + 1 exchangeable scores each is equally likely to have any rank, so that (1 - coverage) / 2 of the n + 1 ranks
    may be beyond either end.
    """
    beyond = floor((len(scores) + 1) * (1 - coverage) / 2 + 1e-9)
    require(beyond >= 1, f"{len(scores)} scores are too few for a coverage of {coverage:.0%}")
    return scores[beyond - 1], scores[-beyond]


def scale(spread: float) -> float:
    return hypot(LEAST_SPREAD, spread)


def _kinds(family: str, network: str) -> tuple[Kind, ...]:
    return (family, network), (family,), ()


@cache
def shipped() -> Calibration:
    """The pairs that were measured before this release."""
    return Calibration.from_json(json.loads(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")))


# -- kinds -------------------------------------------------------------------------------------------------------------


def recipe_family(recipe: Recipe) -> str:
    """Family of recipes with similar step times: gossip, local, delayed, dense or compressed."""
    stage = recipe.strategy.steady_stage
    if isinstance(stage, GossipStage):
        return "gossip"
    if stage.schedule.delay:
        return "delayed"
    if stage.local_parameters:
        return "local"
    return "dense" if isinstance(recipe.compressor, Dense) else "compressed"


def network_class(network: Network) -> str:
    """sites with several sites, far with a round trip of 5 ms or more, else near."""
    if network.paths:
        return "sites"
    return "far" if network.default.round_trip_seconds >= FAR_SECONDS else "near"
