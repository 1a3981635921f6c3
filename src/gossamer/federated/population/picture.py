"""Picture: draws the labels of each device, with a column per device and a color per label (matplotlib)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gossamer.base.figures import check_matplotlib, figure, light_grid, open_frame
from gossamer.errors import require
from gossamer.federated.population.partition import labels as read_labels

MOST_BUBBLES = 30  # devices in a bubble plot
MOST_COLUMNS = 400  # devices in a bar plot; of more, an even sample is drawn
MOST_LABELS = 20  # with a color or a row of their own; rarer ones are merged
OTHERS = "others"


def plot_partition(parts: Sequence[Sequence[int]], dataset_or_labels: Any, path: str | Path, title: str = "") -> None:
    """Draw the labels of each device: bubbles for up to 30 devices, stacked bars for more.

    Args:
        parts: result of `partition` for the same dataset or labels.
        dataset_or_labels: the dataset, or its labels (n,).
        path: the PNG file to write.
        title: of the picture.

    Raises:
        GossamerError: matplotlib is not installed.
        ValueError: the parts belong to other data, or there are no parts.

    Example:
        >>> labels = [0, 1, 0, 1]
        >>> parts = gossamer.federated.population.partition(labels, clients=2, fewest=1)
        >>> gossamer.federated.population.plot_partition(parts, labels, directory / "parts.png")
    """
    check_matplotlib()
    every = read_labels(dataset_or_labels)
    last = max((index for part in parts for index in part), default=-1)
    require(bool(parts), "parts must be the result of partition(), one list per device, but it is empty")
    require(
        last < len(every),
        f"the parts have sample {last}, but there are {len(every)} labels: pass the dataset that was divided",
    )
    names = _names(every)
    held = [Counter(names.get(every[index], OTHERS) for index in part) for part in parts]
    rows = [*dict.fromkeys(names.values()), *([OTHERS] if any(OTHERS in labels for labels in held) else [])]
    if len(held) <= MOST_BUBBLES:
        picture = figure(max(4.4, 2.2 + 0.3 * len(held)), 1.6 + 0.27 * len(rows))
        _bubbles(picture.subplots(), held, rows)
    else:
        picture = figure(11, 4.2)
        _bars(picture.subplots(), held, rows)
    if title:
        picture.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    picture.savefig(path)


def _names(every: Sequence[Any]) -> dict[Any, str]:
    """Names of the most frequent labels, in order: short ones where these differ."""
    frequent = [label for label, _ in Counter(every).most_common(MOST_LABELS)]
    if all(isinstance(label, int | float) for label in frequent):
        names = {label: f"{label:g}" for label in sorted(frequent)}
    else:
        names = {label: str(label)[:20] for label in sorted(frequent, key=str)}
    labels_of = Counter([*names.values(), OTHERS])
    return {label: name if labels_of[name] == 1 else repr(label) for label, name in names.items()}


def _bubbles(axes: Any, held: Sequence[Counter[str]], rows: Sequence[str]) -> None:
    """Bubbles with an area proportional to the number of samples."""
    most = max((count for labels in held for count in labels.values()), default=1)
    colors = _colors(len(rows))
    for row, name in enumerate(rows):
        counts = [(place, labels[name]) for place, labels in enumerate(held) if labels[name]]
        places, sizes = [place for place, _ in counts], [6 + 210 * count / most for _, count in counts]
        axes.scatter(places, [row] * len(places), s=sizes, color=colors[row], alpha=0.85, linewidths=0)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(range(len(held)), [str(sum(labels.values())) for labels in held], fontsize=7)
    axes.set_xlim(-0.7, len(held) - 0.3)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xlabel(f"one column per device, with its number of samples\nlargest bubble: {most} of a label")
    axes.set_ylabel("label")
    light_grid(axes, alpha=0.18)
    axes.tick_params(length=0)
    open_frame(axes, without=("top", "right", "bottom", "left"))


def _bars(axes: Any, held: Sequence[Counter[str]], rows: Sequence[str]) -> None:
    """Stacked bars, with the largest devices on the left."""
    order = sorted(held, key=lambda labels: -sum(labels.values()))
    step = max(len(order) / MOST_COLUMNS, 1.0)
    shown = [order[int(place * step)] for place in range(int(len(order) / step))]
    below, colors = [0] * len(shown), _colors(len(rows))
    for row, name in enumerate(rows):
        heights = [labels[name] for labels in shown]
        axes.bar(range(len(shown)), heights, bottom=below, width=0.9, color=colors[row], label=name, linewidth=0)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    which = f"{len(held)} devices" if len(shown) == len(held) else f"{len(shown)} of {len(held)} devices"
    axes.set_xlabel(f"{which}, those with most samples on the left")
    axes.set_ylabel("samples")
    axes.set_xticks([])
    axes.set_xlim(-0.7, len(shown) - 0.3)
    light_grid(axes, "y")
    open_frame(axes, without=("top", "right", "bottom"))
    columns = -(-len(rows) // 12)
    axes.legend(title="label", loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8, ncols=columns)


def _colors(count: int) -> list[Any]:
    from matplotlib import colormaps

    table = colormaps["tab10" if count <= 10 else "tab20"]
    return [table(place % table.N) for place in range(count)]
