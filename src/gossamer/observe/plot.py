"""Plot of records (matplotlib): loss over time and over bytes, and where a step's time went."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gossamer.errors import GossamerError
from gossamer.observe.record import Record
from gossamer.observe.units import BYTE_UNITS

# Safe for color-blind readers (Okabe and Ito)
RECIPE_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PART_COLORS = {
    "compute": "#4C6A92",
    "waiting": "#E4A33B",
    "encode": "#9CC3D5",
    "wire": "#C8553D",
    "decode": "#8DA47E",
}
MAIN_PARTS = ("compute", "waiting")
SMOOTHED_POINTS = 60


def check_matplotlib() -> None:
    """Raise GossamerError before a run whose picture could not be drawn after it."""
    if find_spec("matplotlib") is None:
        raise GossamerError(
            "A picture needs matplotlib, which is not installed here, and only the end of the run would tell. "
            'Write: pip install "gossamer[plot]"'
        )


def plot(records: Sequence[Record], path: Path, metric: str = "loss") -> None:
    """Draw `records`, one color a recipe, into the PNG file `path`."""
    check_matplotlib()
    from matplotlib.figure import Figure

    bars = 2 * len(records)
    figure = Figure(figsize=(13, 3.8 + 0.2 * bars), layout="constrained", dpi=150)
    over_time, over_bytes, split = figure.subplots(1, 3)
    unit, size = _byte_unit(records)
    for place, record in enumerate(records):
        color = RECIPE_COLORS[place % len(RECIPE_COLORS)]
        points = [point for point in record["metrics"].get(metric, ()) if point[2] is not None]
        sent = record["bytes_sent_per_step"]["accounted"]
        values = [value for _, _, value in points]
        _curve(over_time, [seconds for _, seconds, _ in points], values, color)
        _curve(over_bytes, [step * sent / size for step, _, _ in points], values, color)
    _dress(over_time, f"{metric} over time", "seconds", metric)
    _dress(over_bytes, f"{metric} over bytes sent", f"{unit} sent per worker", metric)
    _split(split, records)
    _legend(figure, records)
    figure.savefig(path)


def _byte_unit(records: Sequence[Record]) -> tuple[str, float]:
    most = max(record["steps"] * record["bytes_sent_per_step"]["accounted"] for record in records)
    place = next((place for place in range(len(BYTE_UNITS)) if most < 1000 ** (place + 1)), len(BYTE_UNITS) - 1)
    return BYTE_UNITS[place], 1000.0**place


def _curve(axes: Any, across: list[float], values: list[float], color: str) -> None:
    """Every value lightly, their running mean on top."""
    width = len(values) // SMOOTHED_POINTS
    if width < 2:
        axes.plot(across, values, color=color, linewidth=1.8, marker="o" if len(values) == 1 else "")
        return
    axes.plot(across, values, color=color, linewidth=0.7, alpha=0.25)
    axes.plot(across, _smoothed(values, width), color=color, linewidth=1.9)


def _smoothed(values: list[float], width: int) -> list[float]:
    """The mean over `width` values to both sides, fewer at the ends."""
    return [
        sum(near) / len(near)
        for place in range(len(values))
        if (near := values[max(0, place - width) : place + width + 1])
    ]


def _dress(axes: Any, title: str, across: str, up: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_xlim(left=0)
    if not axes.lines or not any(len(line.get_xdata()) for line in axes.lines):
        axes.text(0.5, 0.5, f"nothing logged:\nsession.log({up}=...)", transform=axes.transAxes, ha="center")


def _split(axes: Any, records: Sequence[Record]) -> None:
    """Two bars a record: the training thread's time; below it the communication thread's, hidden or not."""
    drawn: set[str] = set()
    for place, record in enumerate(records):
        main = {part: record[f"{part}_seconds_per_step"] for part in MAIN_PARTS}
        _bar(axes, 2.6 * place, main, drawn)
        _bar(axes, 2.6 * place + 0.95, record["communication_seconds_per_step"], drawn)
    heights = [2.6 * place + offset for place in range(len(records)) for offset in (0, 0.95)]
    axes.set_yticks(heights, ["training", "lane"] * len(records))
    for tick, place in zip(axes.get_yticklabels(), [place for place in range(len(records)) for _ in "ab"], strict=True):
        if len(records) > 1:
            tick.set_color(RECIPE_COLORS[place % len(RECIPE_COLORS)])
    axes.set_ylim(max(heights) + 0.7, -0.7 - 0.12 * (max(heights) + 1.4))  # room for the legend
    axes.set_title("time per step", loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    legend = {"frameon": False, "fontsize": 8, "handlelength": 1, "columnspacing": 0.9, "handletextpad": 0.4}
    axes.legend(loc="upper left", bbox_to_anchor=(-0.02, 1.02), ncols=5, **legend)


def _bar(axes: Any, height: float, parts: dict[str, float], drawn: set[str]) -> None:
    left = 0.0
    for part, seconds in parts.items():
        label = "" if part in drawn else part
        drawn.add(part)
        axes.barh(height, 1000 * seconds, left=left, height=0.8, color=PART_COLORS[part], label=label)
        left += 1000 * seconds


def _legend(figure: Any, records: Sequence[Record]) -> None:
    """One recipe is a title, several are a legend."""
    from matplotlib.lines import Line2D

    labels = [f"{record['recipe']}, {record['workers']} workers" for record in records]
    if len(records) == 1:
        figure.suptitle(labels[0], x=0.01, ha="left", fontsize=10, color="#555555")
        return
    handles = [
        Line2D([], [], color=RECIPE_COLORS[place % len(RECIPE_COLORS)], linewidth=2.5) for place in range(len(records))
    ]
    figure.legend(handles, labels, loc="outside upper left", frameon=False, fontsize=9)
