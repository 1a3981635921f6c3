"""Runs of many compressors as tables, sentences and a picture."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from pathlib import Path

from benchmarks.tasks import TASKS
from benchmarks.training import Run

from gossamer.observe.units import bytes_text

DENSE = "Dense()"
IMPROVED, WORSE = 10, 3  # spreads from which on a task can tell

HEADER = (
    "| compressor | training loss | gap | held-out loss | sent a step and worker | of Dense() "
    "| Dense() for the same bytes | without feedback | gap |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)
ABOUT = (
    "Four workers, simulated in one process, with real aggregations; mean over seeds ± standard deviation. The "
    "training loss is that of fixed samples to learn from. A gap is its distance to that of `Dense()` after as many "
    "steps, in spreads: standard deviations of `Dense()` over seeds. `Dense()` for the same bytes was stopped when it "
    "had sent as much. The learning rate is constant, and the same for all."
)


@dataclass(frozen=True)
class Losses:
    """By seed; inf where the training diverged."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        several = len(self.values) > 1 and isfinite(self.mean)
        return statistics.stdev(self.values) if several else nan

    def __str__(self) -> str:
        if not isfinite(self.mean):
            return f"diverged ({sum(value == inf for value in self.values)} of {len(self.values)})"
        return f"{self.mean:.3f}" + (f" ± {self.deviation:.3f}" if isfinite(self.deviation) else "")


@dataclass(frozen=True)
class Table:
    """The runs of one task by compressor, in the order of seeds."""

    task: str
    runs: Mapping[str, Sequence[Run]]

    @property
    def spread(self) -> float:
        return self.losses(DENSE).deviation

    def losses(self, compressor: str) -> Losses:
        return Losses(tuple(_number(run["curve"][-1][2]) for run in self.runs[compressor]))

    def held_out(self, compressor: str) -> Losses:
        return Losses(tuple(_number(run["held_out"]) for run in self.runs[compressor]))

    def bytes_a_step(self, compressor: str) -> float:
        return statistics.fmean(run["curve"][-1][1] / run["curve"][-1][0] for run in self.runs[compressor])

    def gap(self, compressor: str) -> float:
        """Spreads by which it is worse than Dense()."""
        return (self.losses(compressor).mean - self.losses(DENSE).mean) / self.spread

    def dense_at_equal_bytes(self, compressor: str) -> tuple[int, Losses]:
        """Steps that as many bytes pay for, at least one, and the losses after them."""
        dense = self.runs[DENSE]
        paid = int(self.bytes_a_step(compressor) * dense[0]["steps"] / self.bytes_a_step(DENSE))
        steps = min(max(1, paid), dense[0]["steps"])
        return steps, Losses(tuple(_number(run["curve"][steps][2]) for run in dense))

    @property
    def improvement(self) -> float:
        """Spreads by which Dense() improves from its start."""
        start = statistics.fmean(_number(run["curve"][0][2]) for run in self.runs[DENSE])
        return (start - self.losses(DENSE).mean) / self.spread


def _number(loss: float | None) -> float:
    return inf if loss is None else loss


def tables(runs: Sequence[Run]) -> Iterator[Table]:
    for task in dict.fromkeys(run["task"] for run in runs):
        mine = [run for run in runs if run["task"] == task]
        names = dict.fromkeys(run["compressor"] for run in mine)
        yield Table(task, {name: [run for run in mine if run["compressor"] == name] for name in names})


def page_part(runs: Sequence[Run], twins: Mapping[str, str], about: Sequence[str]) -> str:
    """A table and what it can tell for each task. twins: the compressor without feedback, by compressor."""
    parts = [ABOUT, *about]
    for table in tables(runs):
        first = table.runs[DENSE][0]
        seeds = len(table.runs[DENSE])
        parts.append(f"### {table.task}\n\n{TASKS[table.task].about}; {first['steps']} steps, {seeds} seeds.")
        shown = [text for text in table.runs if text not in twins.values()]
        parts.append("\n".join([HEADER, *(_line(table, text, twins.get(text)) for text in shown)]))
        parts.append(verdict(table, {text: twins[text] for text in shown if text in twins}))
    return "\n\n".join(parts)


def _line(table: Table, text: str, twin: str | None) -> str:
    sent = table.bytes_a_step(text)
    steps, affordable = table.dense_at_equal_bytes(text)
    forgetful = (str(table.losses(twin)), _gap(table.gap(twin))) if twin is not None else ("", "")
    compared = ("", "") if text == DENSE else (_gap(table.gap(text)), f"{affordable} ({steps} steps)")
    share = f"1/{table.bytes_a_step(DENSE) / sent:.1f}"
    losses = (str(table.losses(text)), compared[0], str(table.held_out(text)))
    cells = (f"`{text}`", *losses, bytes_text(sent), share, compared[1], *forgetful)
    return f"| {' | '.join(cells)} |"


def _gap(spreads: float) -> str:
    return f"{spreads:+.1f}" if isfinite(spreads) else "-"


def verdict(table: Table, twins: Mapping[str, str]) -> str:
    """What the task can tell, and what it cannot."""
    if not isfinite(table.spread):
        return "One seed has no spread, so this table tells nothing about gaps."
    said = [f"From its start `Dense()` improves by {table.improvement:.0f} spreads"]
    said[0] += "." if table.improvement >= IMPROVED else f", fewer than {IMPROVED}: **this task cannot tell.**"
    worse = {text: table.gap(twin) - table.gap(text) for text, twin in twins.items()}
    telling = [f"`{text}`" for text, spreads in worse.items() if not spreads < WORSE]
    others = [f"`{text}`" for text, spreads in worse.items() if spreads < WORSE]
    if telling:
        said.append(f"Without feedback at least {WORSE} spreads worse, so the task can tell: {', '.join(telling)}.")
    if others:
        said.append(f"Feedback makes less difference than that, so the task cannot tell: {', '.join(others)}.")
    return " ".join(said)


def sentences(runs: Sequence[Run]) -> Iterator[str]:
    """How long it took."""
    for table in tables(runs):
        seconds = sum(run["seconds"] for mine in table.runs.values() for run in mine)
        yield f"{table.task}: {seconds:.0f} s of training in {sum(map(len, table.runs.values()))} runs"


def plot(runs: Sequence[Run], path: Path) -> None:
    """Training loss, mean over seeds, over bytes sent: a panel for each task."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    every = list(tables(runs))
    names = list(dict.fromkeys(text for table in every for text in table.runs if "feedback=False" not in text))
    colours = dict(zip(names, (matplotlib.colormaps["tab20"](place / 20) for place in range(20)), strict=False))
    figure = Figure(figsize=(5.5 * len(every), 6), layout="constrained", dpi=120)
    for axes, table in zip(figure.subplots(1, len(every), squeeze=False)[0], every, strict=True):
        for text in names:
            points = _mean_curve(table.runs.get(text, ()))
            axes.plot(*zip(*points, strict=True), color=colours[text], label=text) if points else None
        axes.set_title(table.task, loc="left")
        axes.set_xlabel("bytes sent per worker")
        axes.set_ylabel("training loss")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))
        axes.spines[["top", "right"]].set_visible(False)
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(
        list(lines.values()), list(map(str, lines)), loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
    figure.savefig(path)


def _mean_curve(runs: Sequence[Run]) -> list[tuple[float, float]]:
    """(bytes, loss) after the steps at which every seed has a loss."""
    found: list[tuple[float, float]] = []
    for points in zip(*(run["curve"][1:] for run in runs), strict=False):
        losses = [loss for _, _, loss in points if loss is not None]
        if len(losses) == len(points):
            found.append((statistics.fmean(sent for _, sent, _ in points), statistics.fmean(losses)))
    return found
