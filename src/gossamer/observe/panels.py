"""Panels: contents of a picture of records, for any drawing library: curves with names at their ends, and step bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from gossamer.base.bounded_mean import mean_of
from gossamer.base.figures import COLORS
from gossamer.base.intervals import sample_mean
from gossamer.base.units import BYTE_UNITS
from gossamer.observe.record import Record

SMOOTHED_POINTS = 30  # number of points of a smoothed curve
LARGEST_DRAWN = 1e300
LONGEST_NAME = 46  # characters


@dataclass(frozen=True)
class Part:
    """A part of a step's time. Its hatch identifies it without colors."""

    key: str  # in records
    name: str
    color: str
    hatch: str  # matplotlib's


TRAINING = (Part("compute", "computing", "#9DB4D0", ""), Part("waiting", "waiting", "#E4A33B", "///"))
COMMUNICATION = (
    Part("encode", "compressing", "#CFE3EC", "..."),
    Part("wire", "on the wire", "#D98C78", "\\\\\\"),
    Part("decode", "decompressing", "#B5C7A8", "xxx"),
)
BARS_TEXT = (
    "Upper bar: the training thread, so the whole step. Lower bar: the communication thread at the same time. The "
    "upper bar waits for the part that does not finish in time."
)


@dataclass(frozen=True)
class Curve:
    """The values of one recipe. low, high: their 95 % intervals over several runs; empty for one run."""

    name: str
    color: str
    across: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()

    @property
    def smoothed(self) -> Sequence[float]:
        """Running mean of many values; at the ends over fewer values."""
        return _smoothed(self.values)

    @property
    def band(self) -> tuple[Sequence[float], Sequence[float]]:
        """The bounds of the intervals, smoothed like the values."""
        return _smoothed(self.low), _smoothed(self.high)


def _smoothed(values: Sequence[float]) -> Sequence[float]:
    width = len(values) // SMOOTHED_POINTS
    if width < 2:
        return values
    near = [values[max(0, place - width) : place + width + 1] for place in range(len(values))]
    return [sum(each) / len(each) for each in near]


@dataclass(frozen=True)
class Panel:
    """Curves on one axis."""

    title: str
    across: str
    up: str
    curves: Sequence[Curve]

    @property
    def empty(self) -> bool:
        return not any(curve.values for curve in self.curves)


@dataclass(frozen=True)
class StepBars:
    """Parts of one recipe's step, in seconds."""

    name: str
    color: str
    training: Sequence[tuple[Part, float]]
    communication: Sequence[tuple[Part, float]]


def panels(
    records: Sequence[Record], metric: str, repeats: Sequence[Sequence[Record]] | None = None
) -> tuple[Panel, Panel]:
    """The metric over seconds and over bytes. repeats: for each record, those of other seeds; curves are means."""
    unit, size = _byte_unit(records)
    over_seconds, over_bytes = [], []
    for (name, color, record), others in zip(_named(records), repeats or [()] * len(records), strict=True):
        points = _mean_points([record, *others], metric)
        sent, values = record["bytes_sent_per_step"]["accounted"], [drawable(point.value) for point in points]
        band = ([drawable(point.low) for point in points], [drawable(point.high) for point in points]) if others else ()
        over_seconds.append(Curve(name, color, [point.seconds for point in points], values, *band))
        over_bytes.append(Curve(name, color, [point.step * sent / size for point in points], values, *band))
    return (
        Panel(f"{metric} over time", "seconds of training", metric, over_seconds),
        Panel(f"{metric} over bytes", f"{unit} sent per worker", metric, over_bytes),
    )


@dataclass(frozen=True)
class _Point:
    step: int
    seconds: float
    value: float
    low: float
    high: float


def _mean_points(runs: Sequence[Record], metric: str) -> list[_Point]:
    """Means over the runs at each step for which all of them logged a finite value."""
    logged = [{step: (seconds, value) for step, seconds, value in run["metrics"].get(metric, ())} for run in runs]
    points = []
    for step in logged[0]:
        found = [each[step] for each in logged if each.get(step, (0, None))[1] is not None]
        if len(found) == len(runs):
            mean = sample_mean([drawable(value) for _, value in found])
            bounds = mean.interval()
            points.append(_Point(step, mean_of(seconds for seconds, _ in found), mean.value, bounds.low, bounds.high))
    return points


def drawable(value: float) -> float:
    """`value` clipped to a range in which differences and sums of many values are finite."""
    return max(-LARGEST_DRAWN, min(LARGEST_DRAWN, value))


def step_bars(records: Sequence[Record]) -> list[StepBars]:
    return [
        StepBars(
            name,
            color,
            [(part, record[f"{part.key}_seconds_per_step"]) for part in TRAINING],
            [(part, record["communication_seconds_per_step"][part.key]) for part in COMMUNICATION],
        )
        for name, color, record in _named(records)
    ]


def _named(records: Sequence[Record]) -> list[tuple[str, str, Record]]:
    return [(shortened(record["recipe"]), COLORS[place % len(COLORS)], record) for place, record in enumerate(records)]


def shortened(name: str) -> str:
    """A name that fits next to a curve. Its ends are kept, since they distinguish recipes."""
    if len(name) <= LONGEST_NAME:
        return name
    half = (LONGEST_NAME - 1) // 2
    return f"{name[:half]}\N{HORIZONTAL ELLIPSIS}{name[-half:]}"


def _byte_unit(records: Sequence[Record]) -> tuple[str, float]:
    most = max(record["steps"] * record["bytes_sent_per_step"]["accounted"] for record in records)
    place = next((place for place in range(len(BYTE_UNITS)) if most < 1000 ** (place + 1)), len(BYTE_UNITS) - 1)
    return BYTE_UNITS[place], 1000.0**place


def spread_apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions close to `wanted` in the same order, `gap` apart and within [low, high]; closer if there is no room.

    After subtracting the gaps, positions only have to ascend, which is isotonic regression: neighbors in the wrong
    order are pooled at their mean (least squares).
    """
    gap = min(gap, (high - low) / max(1, len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    pools: list[tuple[float, int]] = []  # (their mean, how many)
    for rank, place in enumerate(order):
        mean, count = wanted[place] - gap * rank, 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    ascending = [min(max(mean, low), high - gap * (len(wanted) - 1)) for mean, count in pools for _ in range(count)]
    found = dict(zip(order, (each + gap * rank for rank, each in enumerate(ascending)), strict=True))
    return [found[place] for place in range(len(wanted))]


def ticks(high: float, low: float = 0.0, most: int = 6) -> list[float]:
    """Round numbers from low to high, at most `most`."""
    span = high - low
    if span <= 0:
        return [low]
    power = 10.0 ** floor(log10(span / (most - 1)))
    step = next(power * times for times in (1, 2, 5, 10) if span / (power * times) <= most - 1 + 1e-9)
    return [step * number for number in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]
