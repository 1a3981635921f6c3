"""Picture of benchmarks/convergence.py: training loss over bytes."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import tables
from benchmarks.training import Run

COLUMNS = 2
DASHES = "-", "--", "-.", ":"  # of the first 20 colors, and when they come again


def plot(runs: Sequence[Run], path: Path) -> None:
    """Training loss, mean over seeds, over bytes sent: a panel for each task."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    every = list(tables(runs))
    names = list(dict.fromkeys(text for table in every for text in table.runs if "feedback=False" not in text))
    colors = matplotlib.colormaps["tab20"]
    styles = {name: {"color": colors(i % 20), "linestyle": DASHES[i // 20 % 4]} for i, name in enumerate(names)}
    columns = min(len(every), COLUMNS)
    rows = -(-len(every) // columns)
    figure = Figure(figsize=(5.5 * columns, 4.5 * rows + 1.5), layout="constrained", dpi=120)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for axes in panels[len(every) :]:
        axes.remove()
    for axes, table in zip(panels, every, strict=False):
        for text in names:
            points = _mean_curve(table.runs.get(text, ()))
            axes.plot(*zip(*points, strict=True), **styles[text], label=text) if points else None
        axes.set_title(table.task, loc="left")
        axes.set_xlabel("bytes sent per worker")
        axes.set_ylabel("training loss")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
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
