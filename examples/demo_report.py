"""Report of examples/demo.py: loss over time as a table and a picture."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRIC = "validation_loss"
COLORS = ("#6B6B6B", "#E69F00", "#009E73", "#0072B2")  # distinguishable with color blindness (Okabe and Ito)
Record = dict[str, Any]


@dataclass(frozen=True)
class Runs:
    """The records of one recipe, one per seed."""

    name: str
    recipe: str | None  # None: torch's DistributedDataParallel
    records: list[Record]

    @property
    def ends(self) -> list[float]:
        return [losses(record)[-1] for record in self.records]


def losses(record: Record) -> list[float]:
    return [loss for _, _, loss in record["metrics"][METRIC]]


def seconds_to(record: Record, loss: float) -> float | None:
    """Seconds until the held-out loss was reached at the end of an evaluation, or None."""
    return next((seconds for _, seconds, found in record["metrics"][METRIC] if found <= loss), None)


def median(values: Sequence[float | None], unit: str, digits: int) -> str:
    """Median over seeds, with the range if there are several."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "never" if not known else f"{len(values) - len(known)} never"
    spread = f" ({min(known):.{digits}f} to {max(known):.{digits}f})" if len(known) > 1 else ""
    return f"{statistics.median(known):.{digits}f}{unit}{spread}"


def table(ways: Sequence[Runs]) -> str:
    """One row per recipe: its final loss, and the time to the final loss of the first row, by seed."""
    first = ways[0]
    own = [seconds_to(*each) for each in zip(first.records, first.ends, strict=True)]
    lines = [("", "recipe", "steps", "held-out loss", f"to {first.name}'s", "speedup")]
    for way in ways:
        reached = [seconds_to(*each) for each in zip(way.records, first.ends, strict=True)]
        sooner = [mine and other and other / mine for mine, other in zip(reached, own, strict=True)]
        steps = f"{statistics.median(record['steps'] for record in way.records):.0f}"
        loss, reached_text = median(way.ends, "", 3), median(reached, " s", 1)
        lines.append((way.name, way.recipe or "", steps, loss, reached_text, median(sooner, "", 1)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if place < 2 else cell.rjust(width)
                  for place, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )  # fmt: skip


def named_ends(ways: Sequence[Runs], apart: float) -> list[tuple[Runs, float]]:
    """Heights of the labels, from below: the final loss, or higher to keep labels `apart`."""
    placed: list[tuple[Runs, float]] = []
    for way in sorted(ways, key=lambda way: statistics.median(way.ends)):
        loss = statistics.median(way.ends)
        placed.append((way, max(loss, placed[-1][1] + apart) if placed else loss))
    return placed


def draw(ways: Sequence[Runs], title: str, seconds: float, picture: Path) -> None:
    """Draw held-out loss over seconds, one labeled line per run; dotted: the final loss of the first recipe."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained", dpi=150)
    axes = figure.subplots()
    colors = dict(zip([way.name for way in ways], COLORS, strict=False))
    for way in ways:
        for record in way.records:
            _, when, loss = zip(*record["metrics"][METRIC], strict=True)
            axes.plot(when, loss, color=colors[way.name], linewidth=2, marker="o", markersize=3)
    bottom, top = axes.get_ylim()
    for way, height in named_ends(ways, 0.11 * (top - bottom)):
        text = f"{way.name}\n{way.recipe}" if way.recipe else way.name
        spot: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "annotation_clip": False, "va": "center"}
        axes.annotate(text, (1.01, height), color=colors[way.name], fontsize=9, **spot)
    axes.axhline(statistics.median(ways[0].ends), color=COLORS[0], linewidth=1, linestyle=":")
    axes.set_xlim(0, seconds)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("held-out loss (nats a byte)")
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    figure.savefig(picture)
