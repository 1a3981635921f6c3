"""Report of benchmarks/local.py: tables and sentences."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan, nan

from benchmarks.losses import Losses, number
from benchmarks.virtual_workers import APART, Run

from gossamer.algorithms.recipes.retained_benefit import retained_benefit, text
from gossamer.base.intervals import ConfidenceInterval
from gossamer.base.units import bytes_text

DENSE = "Dense()"
LEARNING_RATE = 1e-3  # the example's own
CLEAR = 3  # spreads from which on one is better than another
COLUMNS = "recipe", "held-out loss", "retained", "gap", "seeds", "sent per worker", "times fewer"
HEADER = f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}"
ABOUT = (
    "Mean over seeds ± standard deviation, after the same number of steps and samples for each recipe. The loss is "
    "that of the averaged parameters. The gap is the distance to the loss of `Dense()`, in standard deviations of "
    "`Dense()` over seeds. `retained` is (L_silent - L) / (L_silent - L_dense) at the same learning rate, with a 95 % "
    "interval over paired seeds: 100 % equals `Dense()`, 0 % equals no communication, and negative values are worse "
    "than no communication. Learning rates are not tuned for each recipe; [retained benefit](ladder.md) "
    "ranks recipes at their own best ones. Bytes are the payload that one worker sends in the whole training, counted "
    "at the transport."
)
SILENT, ALONE = "no communication, mean of four workers", "no communication, one worker"  # rows of the table


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

    def retained(self, name: str) -> ConfidenceInterval | None:
        """The retained benefit of a recipe, against silence and lock step at the same learning rate.

        None for these two, where one of them was not trained, and where lock step is not better than silence.
        """
        rate = self.runs[name][0]["learning_rate"]
        dense, silent = named(DENSE, rate), named(APART, rate)
        if name in (dense, silent) or dense not in self.runs or silent not in self.runs:
            return None
        mine, together, apart = (
            {run["seed"]: number(run["held_out"]) for run in self.runs[arm]} for arm in (name, dense, silent)
        )
        try:
            return retained_benefit(mine, silent=apart, dense=together)
        except ValueError:
            return None

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
        lines.append(_line(found, f"{SILENT}{rate}", found.losses(silent), silent))
        lines.append(_line(found, f"{ALONE}{rate}", found.alone(silent), silent))
    return "\n".join([*lines, *(_line(found, f"`{name}`", found.losses(name), name) for name in found.talking)])


def _line(found: Study, name: str, losses: Losses, recipe: str) -> str:
    gap, share = found.gap(losses), found.retained(recipe)
    cells = (
        name,
        str(losses),
        "" if share is None else text(share),
        f"{gap:+.1f}" if isfinite(gap) and recipe != DENSE else "",
        str(len(losses.values)),
        bytes_text(found.bytes_sent(recipe)),
        f"{found.saving(recipe):,.0f}" if isfinite(found.saving(recipe)) else "",
    )
    return f"| {' | '.join(cells)} |"


def sentences(found: Study) -> Iterator[str]:
    """Whether rare synchronization beats none, and how rare is as good as every step."""
    if not isfinite(found.losses(DENSE).spread):
        yield "One seed has no standard deviation, so this table has no gaps."
        return
    leads = {name: found.lead(name) for name in found.talking if not isnan(found.lead(name))}
    clear = [f"`{name}`" for name, spreads in leads.items() if spreads > CLEAR]
    others = [f"`{name}`" for name, spreads in leads.items() if not spreads > CLEAR]
    if clear:
        smallest = min(spreads for spreads in leads.values() if spreads > CLEAR)
        yield (
            "Better than both rows without communication at the same learning rate, by at least "
            f"{smallest:.0f} standard deviations, the larger of the two: {', '.join(clear)}."
        )
    if others:
        yield f"Not better than both by more than {CLEAR} standard deviations: {', '.join(others)}."
    for dense in found.of(DENSE):
        enough = found.enough(dense)
        rates = {found.runs[name][0]["learning_rate"] for name in (enough, dense)}
        other = ", at another learning rate" * (len(rates) > 1)
        yield (
            f"Fewest bytes with at most the loss of `{dense}` plus one standard deviation: `{enough}`, "
            f"{bytes_text(found.bytes_sent(enough))} per worker, **{found.saving(enough):,.0f} times fewer**{other} "
            f"(seeds: {len(found.runs[enough])}; of `{dense}`: {len(found.runs[dense])})."
        )


def page_part(found: Study, about: Sequence[str]) -> str:
    return "\n\n".join([ABOUT, *about, table(found), *sentences(found)])
