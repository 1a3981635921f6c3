"""Report of benchmarks/federated.py: the table and the picture, from the runs that are kept."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.federated import (
    CLIENTS,
    DOWN,
    EVERYWHERE,
    FEWER_EVERYWHERE,
    FRACTION,
    PASSES,
    RATES,
    REPORT_BYTES,
    SMOOTHED,
    SPARSE,
    TARGET,
    TUNING_SEED,
    UP,
    Record,
    Run,
    sent,
    tuned,
)
from benchmarks.provenance import provenance

from gossamer.base import figures

Row = tuple[str, str, str]
BASE: Row = ("FedAvg", "Dense()", "")
COLORS = {
    "Dense()": "#D55E00",
    "Int8()": "#E69F00",
    SPARSE: "#0072B2",
    EVERYWHERE: "#009E73",
    FEWER_EVERYWHERE: "#CC79A7",
}
STYLES = {"FedAvg": "-", "FedProx": "--", "SCAFFOLD": ":", "FedBuff": "-."}
HEAD = ("strategy", "compressor", "rate", "rounds", "up", "times fewer", "down", "minutes", "reached")


def finals(record: Record, row: Row) -> list[Run]:
    """The row's runs with its best setting, on the seeds that it was not tuned on."""
    if not record.of(strategy=row[0], compressor=row[1], pull=row[2]):
        return []
    best = tuned(record, row)["setting"]
    same = {key: value for key, value in best.items() if key != "seed"}
    return [each for each in record.of(**same) if each["setting"]["seed"] != TUNING_SEED]


def write_part(record: Record, rows: Sequence[Row]) -> str:
    """The part of the page between its markers."""
    base = _median_up(finals(record, BASE))
    lines = [f"| {' | '.join(HEAD)} |", "|---|---|" + "---:|" * (len(HEAD) - 2)]
    lines += [f"| {' | '.join(_cells(record, row, base))} |" for row in rows]
    about = (
        f"{CLIENTS} devices, {FRACTION:.0%} per round, digits by Dirichlet 0.1, {UP / 1e6:g} Mbit/s up, "
        f"{DOWN / 1e6:g} Mbit/s down. Rounds, megabytes of all devices and simulated minutes until the mean of "
        f"{SMOOTHED} rounds' accuracies on unseen digits is {TARGET:.0%}: medians over seeds (and ranges). Each row "
        f"is tuned in the same way on a separate seed: {PASSES} passes over a device's data, learning rates "
        f"{_list(RATES)}, selected by the fewest bytes up. Bytes up are payloads plus {REPORT_BYTES} per report."
    )
    commits = sorted({each["commit"] for row in rows for each in finals(record, row)})
    made = f"Trained at {', '.join(f'`{name}`' for name in commits)}."
    picture = "![accuracy on unseen digits over the bytes that all devices sent, one curve per row](federated.png)"
    return "\n\n".join([about, f"{provenance()} {made}", "\n".join(lines), picture])


def _list(numbers: Sequence[float]) -> str:
    return f"{', '.join(f'{each:g}' for each in numbers[:-1])} and {numbers[-1]:g}"


def _median_up(runs: Sequence[Run]) -> float:
    reached = [sent(each["points"]) for each in runs if each["reached"]]
    return median(reached) if len(reached) * 2 > len(runs) else float("nan")


def _cells(record: Record, row: Row, base: float) -> Iterator[str]:
    strategy, compressor, pull = row
    runs, best = finals(record, row), tuned(record, row)["setting"]
    reached = [each for each in runs if each["reached"]]
    yield strategy
    yield f"`{compressor}`" + (f", pull `{pull}`" if pull else "")
    yield f"{best['rate']:g}"
    if len(reached) * 2 <= len(runs):
        best_seen = max(point[3] for each in runs for point in each["points"])
        yield from ("", "", "", "", "", f"{len(reached)} of {len(runs)}; at best {best_seen:.1%}")
        return
    yield _spread([float(len(each["points"])) for each in reached], ".0f")
    yield _spread([sent(each["points"]) / 1e6 for each in reached], ".3g")
    yield f"{base / _median_up(runs):.3g}"
    yield _spread([sum(point[1] for point in each["points"]) / 1e6 for each in reached], ".3g")
    yield _spread([each["points"][-1][2] / 60 for each in reached], ".2g")
    yield f"{len(reached)} of {len(runs)}"


def _spread(values: Sequence[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def draw(record: Record, rows: Sequence[Row], path: Path) -> None:
    """Accuracy over bytes up, the seed whose bytes are the median for each row; a panel for each strategy."""
    strategies = [each for each in STYLES if any(row[0] == each for row in rows)]
    figure = figures.figure(max(4.1 * len(strategies), 6.0), 4.7, dpi=130)
    every = figure.subplots(1, len(strategies), sharey=True, sharex=True, squeeze=False)[0]
    for axes, strategy in zip(every, strategies, strict=True):
        for row in rows:
            if row[0] == strategy and not row[2]:
                _curve(axes, _typical(finals(record, row)), row[1])
        axes.axhline(TARGET, color="#777777", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_xscale("log")
        figures.title(axes, strategy)
        axes.set_xlabel("megabytes that all devices sent")
        axes.set_ylim(0.4, 1.0)
        figures.light_grid(axes)
        figures.open_frame(axes)
    every[0].set_ylabel(f"accuracy on unseen digits, mean of {SMOOTHED} rounds")
    handles = {name: line for axes in every for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    columns = max(len(strategies), 1)
    figure.legend(handles.values(), handles, loc="outside lower left", fontsize=7.5, frameon=False, ncols=columns)
    figure.savefig(path)


def _typical(runs: Sequence[Run]) -> Run:
    ordered = sorted(runs, key=lambda each: sent(each["points"]))
    return ordered[len(ordered) // 2]


def _curve(axes: Any, made: Run, compressor: str) -> None:
    points = made["points"]
    across = [sent(points[: count + 1]) / 1e6 for count in range(len(points))]
    raw = [point[3] for point in made["points"]]
    windows = [raw[max(0, count - SMOOTHED) : count] for count in range(1, len(raw) + 1)]
    smooth = [sum(window) / len(window) for window in windows]
    name = compressor.partition(", rest=")[0].removeprefix("Route(").replace("density=", "")
    label = f"{name}, biases too" if compressor.startswith("Route(") else name
    axes.plot(across, smooth, color=COLORS.get(compressor, "#555555"), linewidth=1.7, label=label)
    if made["reached"]:
        axes.plot(across[-1:], smooth[-1:], "o", color=COLORS.get(compressor, "#555555"), markersize=5)
