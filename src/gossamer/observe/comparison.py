"""Comparison of records: step time, loss at equal time and equal steps, bytes, money."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from gossamer.base.bounded_mean import mean_of
from gossamer.observe.record import Record
from gossamer.observe.target import Target

LOSSES = ("validation_loss", "loss")  # the first one found is used
SMOOTHED_POINTS = 10  # of a training loss, which is noisy; a validation loss is not smoothed


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices in one currency; None is free."""

    per_hour: float | None = None  # of one worker
    per_gigabyte: float | None = None  # sent

    def of(self, record: Record, seconds: float) -> float | None:
        """Cost of the whole run until `seconds`; None without any price."""
        if self.per_hour is None and self.per_gigabyte is None:
            return None
        share = seconds / record["seconds"] if record["seconds"] else 0.0
        sent = record["workers"] * record["steps"] * share * record["bytes_sent_per_step"]["accounted"]
        hours = record["workers"] * seconds / 3600
        return float((self.per_hour or 0.0) * hours + (self.per_gigabyte or 0.0) * sent / 1e9)


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """The row of one recipe. Losses that are missing in that range have the value None."""

    recipe: str
    step_seconds: float
    waiting_share: float
    bytes_per_step: float
    bits_per_second_to_hide: float | None  # a step's bits over its compute time; None without compute time
    steps: int
    seconds: float
    loss_at_equal_time: float | None
    loss_at_equal_steps: float | None
    seconds_to_target: float | None
    step_ratio: float  # seconds per step over the first row's
    unlimited_ratio: float | None  # over that of the run without a network limit
    foretold_step_seconds: float | None
    money: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All rows, and the time and step at which losses are compared."""

    rows: tuple[ComparisonRow, ...]
    metric: str | None  # the loss that all scripts logged
    equal_seconds: float  # of the shortest run
    equal_steps: int  # of the run with the fewest steps
    target: Target | None
    unlimited_step_seconds: float | None  # of the run without a network limit


def compare(
    records: Sequence[Record],
    *,
    unlimited: Record | None = None,
    target: Target | None = None,
    prices: Prices | None = None,
    estimates: Sequence[float | None] | None = None,
) -> Comparison:
    """Compare records.

    Args:
        records: of the runs to compare.
        unlimited: the record of a run without a network limit; None without one.
        target: a metric and its bound, for the time to reach it.
        prices: for the cost of each run.
        `estimates`: estimated seconds of a step, for each record.

    Returns:
        A row for each record, with losses at the end of the shortest run.
    """
    seconds = min(record["seconds"] for record in records)
    steps = min(record["steps"] for record in records)
    metric = _metric(records, seconds, steps)
    first = records[0]["seconds_per_step"]["median"]
    floor = unlimited["seconds_per_step"]["median"] if unlimited else None
    rows = [
        _row(record, metric, seconds, steps, first, floor, target, prices or Prices(), predicted)
        for record, predicted in zip(records, estimates or [None] * len(records), strict=True)
    ]
    return Comparison(
        rows=tuple(rows),
        metric=metric,
        equal_seconds=seconds,
        equal_steps=steps,
        target=target,
        unlimited_step_seconds=floor,
    )


def _row(
    record: Record,
    metric: str | None,
    seconds: float,
    steps: int,
    first: float,
    floor: float | None,
    target: Target | None,
    prices: Prices,
    predicted: float | None,
) -> ComparisonRow:
    step_seconds = record["seconds_per_step"]["median"]
    reached = seconds_to(record, target)
    computing, sent = record["compute_seconds_per_step"], record["bytes_sent_per_step"]["accounted"]
    total = computing + record["waiting_seconds_per_step"]
    return ComparisonRow(
        recipe=record["recipe"],
        step_seconds=step_seconds,
        waiting_share=record["waiting_seconds_per_step"] / total if total else 0.0,
        bytes_per_step=sent,
        bits_per_second_to_hide=8 * sent / computing if computing else None,
        steps=record["steps"],
        seconds=record["seconds"],
        loss_at_equal_time=value_until(record, metric, 1, seconds),
        loss_at_equal_steps=value_until(record, metric, 0, steps),
        seconds_to_target=reached,
        step_ratio=step_seconds / first if first else 1.0,
        unlimited_ratio=step_seconds / floor if floor else None,
        foretold_step_seconds=predicted,
        money=prices.of(record, reached if reached is not None else record["seconds"]),
    )


def _metric(records: Sequence[Record], seconds: float, steps: int) -> str | None:
    """The loss that all records have early enough to be compared, else one that all have at all. A loss logged only at
    the end of a run is later than the end of shorter runs."""
    logged = [name for name in LOSSES if all(name in record["metrics"] for record in records)]
    limits = ((1, seconds), (0, steps))

    def in_time(name: str) -> bool:
        return all(value_until(record, name, *limit) is not None for record in records for limit in limits)

    return next(filter(in_time, logged), logged[0] if logged else None)


def value_until(record: Record, metric: str | None, column: int, limit: float) -> float | None:
    """A metric's value at a limit: column 0 is in steps, 1 in seconds."""
    points: Sequence[Any] = record["metrics"].get(metric, ()) if metric else ()
    seen = [point[2] for point in points if point[column] <= limit + 1e-9 and point[2] is not None]
    if not seen:
        return None
    return float(seen[-1]) if metric == "validation_loss" else mean_of(seen[-SMOOTHED_POINTS:])


def loss_at(record: Record, metric: str | None, steps: float) -> float:
    """The loss after this many steps; infinite if the last one was not finite, or none was logged by then."""
    points = [point for point in record["metrics"].get(metric, ()) if point[0] <= steps] if metric else []
    loss = value_until(record, metric, 0, steps) if points and points[-1][2] is not None else None
    return inf if loss is None or not isfinite(loss) else loss


def final_loss(record: Record) -> float:
    """The final validation loss, else the final training loss; infinite if it is not finite."""
    return loss_at(record, next((each for each in LOSSES if each in record["metrics"]), None), inf)


def seconds_to(record: Record, target: Target | None) -> float | None:
    """Seconds until a metric first reached its target; None if it did not."""
    points = record["metrics"].get(target.metric, ()) if target else ()
    return next((point[1] for point in points if target and target.reached(point[2])), None)
