"""Report of benchmarks/local.py: tables, sentences and a picture."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import Any

from benchmarks.losses import Losses, number
from benchmarks.virtual_workers import APART, Run

from gossamer.observe.units import bytes_text
from gossamer.recipes.recipe import resolve

DENSE = "Dense()"
LEARNING_RATE = 1e-3  # the example's own
CLEAR = 3  # spreads from which on one is better than another
HEADER = "| recipe | held-out loss | gap | seeds | sent per worker | times fewer |\n|---|---:|---:|---:|---:|---:|"
ABOUT = (
    "Mean over seeds ± standard deviation, after as many steps, so as many samples, for all. The loss is that of what "
    "the workers agree on. A gap is its distance to that of `Dense()` in spreads: standard deviations of `Dense()` "
    "over seeds. Bytes are the payload of all that a worker says in the whole training, counted where it is sent."
)
# Safe for color-blind readers (Okabe and Ito)
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX*p"


@dataclass(frozen=True)
class Study:
    """Runs of as many steps, by recipe, in the order of seeds."""

    runs: Mapping[str, Sequence[Run]]

    def losses(self, recipe: str) -> Losses:
        return Losses(tuple(number(run["held_out"]) for run in self.runs[recipe]))

    def alone(self, recipe: str) -> Losses:
        """Of the first worker's own model."""
        return Losses(tuple(number(run["alone"]) for run in self.runs[recipe]))

    def bytes_sent(self, recipe: str) -> float:
        return statistics.fmean(run["bytes_sent"] for run in self.runs[recipe])

    def saving(self, recipe: str) -> float:
        sent = self.bytes_sent(recipe)
        return self.bytes_sent(DENSE) / sent if sent else inf

    def gap(self, losses: Losses) -> float:
        """Spreads of Dense() by which they are worse than Dense()'s."""
        dense = self.losses(DENSE)
        return (losses.mean - dense.mean) / dense.spread

    def of(self, recipe: str) -> list[str]:
        """A recipe at every learning rate that was tried."""
        return [name for name, runs in self.runs.items() if runs[0]["recipe"] == recipe]

    @property
    def talking(self) -> list[str]:
        """Recipes that communicate, but for Dense() at the example's learning rate; those that send most first."""
        others = [name for name in self.runs if name not in (DENSE, *self.of(APART))]
        return sorted(others, key=self.bytes_sent, reverse=True)

    def lead(self, name: str) -> float:
        """Spreads by which it beats workers that never communicate, at its learning rate; nan where that is unknown."""
        silent = named(APART, self.runs[name][0]["learning_rate"])
        if silent not in self.runs:
            return nan
        return min(self.losses(name).lead(other) for other in (self.losses(silent), self.alone(silent)))

    def enough(self, dense: str) -> str:
        """The recipe that sends least of all that lose no more than one spread to `dense`, which is one of them."""
        limit = self.losses(dense).mean + self.losses(dense).spread
        within = [name for name in (*self.talking, DENSE) if self.losses(name).mean <= limit]
        return min(within, key=self.bytes_sent, default=dense)


def study(runs: Sequence[Run]) -> Study:
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        found.setdefault(named(run["recipe"], run["learning_rate"]), []).append(run)
    return Study(found)


def named(recipe: str, learning_rate: float) -> str:
    """A run's name in tables."""
    return recipe if learning_rate == LEARNING_RATE else f"{recipe}, lr {learning_rate:g}"


def table(found: Study) -> str:
    """Dense(), then workers that never communicate, then the others, those that send most first."""
    lines = [HEADER, _line(found, f"`{DENSE}`", found.losses(DENSE), DENSE)]
    for silent in found.of(APART):
        rate = silent.removeprefix(APART)
        lines.append(_line(found, f"four that never talk, on average{rate}", found.losses(silent), silent))
        lines.append(_line(found, f"one of them{rate}", found.alone(silent), silent))
    return "\n".join([*lines, *(_line(found, f"`{name}`", found.losses(name), name) for name in found.talking)])


def _line(found: Study, name: str, losses: Losses, recipe: str) -> str:
    gap = found.gap(losses)
    cells = (
        name,
        str(losses),
        f"{gap:+.1f}" if isfinite(gap) and recipe != DENSE else "",
        str(len(losses.values)),
        bytes_text(found.bytes_sent(recipe)),
        f"{found.saving(recipe):,.0f}" if isfinite(found.saving(recipe)) else "",
    )
    return f"| {' | '.join(cells)} |"


def sentences(found: Study) -> Iterator[str]:
    """Whether rare synchronization beats none, and how rare is as good as every step."""
    if not isfinite(found.losses(DENSE).spread):
        yield "One seed has no spread, so this table tells nothing about gaps."
        return
    leads = {name: found.lead(name) for name in found.talking if not isnan(found.lead(name))}
    clear = [f"`{name}`" for name, spreads in leads.items() if spreads > CLEAR]
    others = [f"`{name}`" for name, spreads in leads.items() if not spreads > CLEAR]
    if clear:
        smallest = min(spreads for spreads in leads.values() if spreads > CLEAR)
        yield (
            "Better than those who never talk at the same learning rate, and than one of them, by at least "
            f"{smallest:.0f} spreads, the larger of the two: {', '.join(clear)}."
        )
    if others:
        yield f"Not better than both by more than {CLEAR} spreads: {', '.join(others)}."
    for dense in found.of(DENSE):
        enough = found.enough(dense)
        yield (
            f"Least bytes at no more loss than that of `{dense}` and one spread of it: `{enough}`, "
            f"{bytes_text(found.bytes_sent(enough))} a worker, **{found.saving(enough):,.0f} times fewer** "
            f"(seeds: {len(found.runs[enough])}, and {len(found.runs[dense])} of the latter)."
        )


def page_part(found: Study, about: Sequence[str]) -> str:
    return "\n\n".join([ABOUT, *about, table(found), *sentences(found)])


def plot(found: Study, path: Path) -> None:
    """Held-out loss over bytes sent: where each recipe ends, and the way that lock step takes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.5), layout="constrained", dpi=120)
    axes = figure.subplots()
    for dense in found.of(DENSE):
        losses = found.losses(dense)
        axes.axhspan(losses.mean - losses.spread, losses.mean + losses.spread, color="#DDDDDD", linewidth=0)
        axes.plot(*zip(*_mean_curve(found.runs[dense]), strict=True), color="#999999", linewidth=1)
    silent = (("never talking", found.losses(APART), "top"), ("one alone", found.alone(APART), "bottom"))
    for ops, losses, beside in silent:
        axes.axhline(losses.mean, color="#999999", linestyle="--", linewidth=1)
        axes.annotate(ops, (1, losses.mean), xycoords=("axes fraction", "data"), ha="right", va=beside, color="#777777")
    for shown, look in _looks(found).items():
        losses = found.losses(shown)
        axes.errorbar(found.bytes_sent(shown), losses.mean, losses.spread, label=shown, capsize=3, **look)
    highest = max(
        losses.mean for losses in (found.alone(APART), *map(found.losses, found.talking)) if isfinite(losses.mean)
    )
    axes.set_ylim(top=highest + 0.2)
    axes.set_xscale("log")
    axes.set_xlabel("bytes sent per worker in the whole training; the grey lines: Dense() on its way")
    axes.set_ylabel("held-out loss, nats a byte")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=7)
    figure.savefig(path)


def _looks(found: Study) -> dict[str, dict[str, Any]]:
    """A marker for each strategy, a color for each compressor; hollow where the learning rate is another."""
    firsts = {name: found.runs[name][0] for name in (DENSE, *found.talking)}
    recipes = {name: resolve(first["recipe"], first["workers"]) for name, first in firsts.items()}
    strategies = dict.fromkeys(recipe.strategy for recipe in recipes.values())
    compressors = dict.fromkeys(recipe.compressor for recipe in recipes.values())
    markers = dict(zip(strategies, cycle(MARKERS), strict=False))
    colors = dict(zip(compressors, cycle(COLORS), strict=False))
    return {
        name: {
            "fmt": markers[recipe.strategy],
            "color": colors[recipe.compressor],
            "fillstyle": "full" if firsts[name]["learning_rate"] == LEARNING_RATE else "none",
        }
        for name, recipe in recipes.items()
    }


def _mean_curve(runs: Sequence[Run]) -> list[tuple[float, float]]:
    """(bytes, loss), mean over seeds."""
    return [
        (points[0][1], statistics.fmean(number(loss) for _, _, loss in points))
        for points in zip(*(run["curve"] for run in runs), strict=True)
    ]
