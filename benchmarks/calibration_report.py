"""Report of benchmarks/calibration.py: how often an 80 % interval held what was measured on networks it had not seen.

Networks are held out whole: errors on one of them are alike, and a part of them would tell of the rest.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from random import Random

from gossamer.base import figures
from gossamer.base.units import seconds_text
from gossamer.plan.estimate.calibration import COVERAGE, Calibration, ForecastInterval, PastForecast, fewest_pairs

HALVES = 200  # of all networks, drawn at random
TARGET = (0.75, 0.85)
Judge = Callable[[Sequence[PastForecast], PastForecast], ForecastInterval]


@dataclass(frozen=True)
class Judged:
    """A past forecast, and the interval that others would have given it."""

    pair: PastForecast
    interval: ForecastInterval

    @property
    def held(self) -> bool:
        return self.interval.holds(self.pair.measured_seconds)


def conformal(past: Sequence[PastForecast], pair: PastForecast) -> ForecastInterval:
    return Calibration(past).interval(pair.estimated_seconds, pair.family, pair.network_class, pair.spread)


def one_network_out(pairs: Sequence[PastForecast], judge: Judge = conformal) -> list[Judged]:
    """Every pair, by those of all other networks."""
    return [Judged(pair, judge([other for other in pairs if other.network != pair.network], pair)) for pair in pairs]


def halves(pairs: Sequence[PastForecast], seed: int = 0, judge: Judge = conformal) -> list[float]:
    """For many ways to part the networks, the share of pairs in one half that the other half's intervals hold."""
    random, networks, shares = Random(seed), sorted({pair.network for pair in pairs}), []
    for _ in range(HALVES):
        kept = set(random.sample(networks, len(networks) // 2))
        known = [pair for pair in pairs if pair.network in kept]
        fresh = [pair for pair in pairs if pair.network not in kept]
        if len(known) >= fewest_pairs(COVERAGE) and fresh:
            shares.append(statistics.fmean(judge(known, pair).holds(pair.measured_seconds) for pair in fresh))
    return shares


def coverage(judged: Iterable[Judged]) -> float:
    return statistics.fmean(each.held for each in judged)


def rows(judged: Sequence[Judged]) -> Iterator[list[str]]:
    """Of all, and by kind: how many, how many were held, how far past errors went, and how wide intervals were."""
    kinds = {"all": [*judged]}
    for each in judged:
        kinds.setdefault(f"recipes: {each.pair.family}", []).append(each)
        kinds.setdefault(f"networks: {each.pair.network_class}", []).append(each)
    for kind, some in sorted(kinds.items(), key=lambda one: (one[0] != "all", one[0])):
        share, ratios = coverage(some), [each.pair.measured_seconds / each.pair.estimated_seconds for each in some]
        error = sqrt(share * (1 - share) / len(some))
        widths = [each.interval.high_seconds / each.interval.low_seconds for each in some]
        yield [
            kind,
            str(len(some)),
            f"{100 * share:.0f} % ± {100 * error:.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{statistics.median(widths):.2f}",
        ]


def table(judged: Sequence[Judged]) -> str:
    head = ["", "runs", "coverage", "measured / estimated", "high / low"]
    lines = [head, ["---", *["---:"] * 4], *rows(judged)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def misses(judged: Sequence[Judged]) -> str:
    """Every run that lay outside, worst first."""

    def far(each: Judged) -> float:
        ratio = each.pair.measured_seconds / each.pair.estimated_seconds
        return max(ratio, 1 / ratio)

    outside = sorted((each for each in judged if not each.held), key=far, reverse=True)
    lines = ["| recipe | network | measured | estimated |", "|---|---|---:|---:|"]
    lines += [
        f"| `{each.pair.recipe}` | {each.pair.network} | {seconds_text(each.pair.measured_seconds)} | "
        f"{seconds_text(each.pair.estimated_seconds)}, {each.interval} |"
        for each in outside
    ]
    return "\n".join(lines)


def page(pairs: Sequence[PastForecast], written: str, picture: str) -> str:
    """The page's text."""
    judged, apart = one_network_out(pairs), halves(pairs)
    share, split = coverage(judged), statistics.fmean(apart) if apart else float("nan")
    low, high = TARGET
    parts = [
        "# Intervals of estimates",
        f"How often does the {COVERAGE:.0%} interval of an estimate contain the measurement? {len(pairs)} short "
        f"trainings with {pairs[0].workers} workers on {len({pair.network for pair in pairs})} random emulated "
        "networks, each estimated from one profile of its recipe and task before the run. Each network is held out "
        "completely: its intervals follow from the runs on all others.",
        written,
        f"Coverage: **{100 * share:.0f} %** with one network held out, {100 * split:.0f} % on average if half of the "
        f"networks give the intervals for the other half ({len(apart)} splits). "
        f"The first is {'within' if low <= share <= high else 'not within'} the target of {100 * low:.0f} to "
        f"{100 * high:.0f} %.",
        table(judged),
        "Coverage: with its standard error. Measured / estimated: median (least to most). High / low: median ratio of "
        "the ends of an interval.",
        f"![measured / estimated by run, with its interval]({picture})",
        "## Outside of the interval",
        misses(judged),
        "The intervals that `gossamer explain` shows follow from all of these runs, on this one machine.",
    ]
    return "\n\n".join(parts) + "\n"


def plot(judged: Sequence[Judged], path: Path) -> None:
    """Measured over estimated, a dot a run, and its interval as a line; by kind of recipe."""
    from matplotlib.ticker import NullFormatter

    order = sorted(
        judged, key=lambda each: (each.pair.family, each.pair.measured_seconds / each.pair.estimated_seconds)
    )
    figure = figures.figure(7.5, 1 + 0.11 * len(order), dpi=120)
    axes = figure.subplots()
    for row, each in enumerate(order):
        color, ends = "#0072B2" if each.held else "#D55E00", (each.interval.low_seconds, each.interval.high_seconds)
        axes.plot(
            [end / each.pair.estimated_seconds for end in ends], [row, row], color="#B8C2CC", linewidth=3, zorder=1
        )
        axes.plot(
            each.pair.measured_seconds / each.pair.estimated_seconds, row, "o", color=color, markersize=3, zorder=2
        )
    families = [each.pair.family for each in order]
    middles = {name: statistics.fmean(i for i, each in enumerate(families) if each == name) for name in families}
    axes.set_yticks([*middles.values()], [*middles])
    axes.axvline(1.0, color="#777777", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks([0.1, 0.2, 0.5, 1, 2, 5, 10], ["0.1", "0.2", "0.5", "1", "2", "5", "10"])
    axes.set_xlim(0.15, 8)
    axes.set_xlabel("measured / estimated (dot) and 80 % interval (line); orange: outside")
    figure.savefig(path)
