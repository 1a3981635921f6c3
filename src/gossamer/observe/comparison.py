"""Comparison of records: step time, loss at equal time and equal steps, bytes, money."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from gossamer.base.bounded_mean import mean_of
from gossamer.observe.record import Record
from gossamer.observe.target import Target

LOSSES = ("validation_loss", "loss")  # the first one counts
SMOOTHED_POINTS = 10  # of a training loss, which is of single batches; a validation loss is taken as it is


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices in one currency; None is free."""

    per_hour: float | None = None  # of one worker
    per_gigabyte: float | None = None  # sent

    def of(self, record: Record, seconds: float) -> float | None:
        """What the whole run cost until `seconds`; None where nothing has a price."""
        if self.per_hour is None and self.per_gigabyte is None:
            return None
        share = seconds / record["seconds"] if record["seconds"] else 0.0
        sent = record["workers"] * record["steps"] * share * record["bytes_sent_per_step"]["accounted"]
        hours = record["workers"] * seconds / 3600
        return float((self.per_hour or 0.0) * hours + (self.per_gigabyte or 0.0) * sent / 1e9)


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One recipe's line. Losses are None where the script logged none in that range."""

    recipe: str
    step_seconds: float
    waiting_share: float
    bytes_per_step: float
    bits_per_second_to_hide: float | None  # a step's bytes, sent while it computes; None where it took no time
    steps: int
    seconds: float
    loss_at_equal_time: float | None
    loss_at_equal_steps: float | None
    seconds_to_target: float | None
    step_ratio: float  # seconds per step over the first row's
    unlimited_ratio: float | None  # over those of the run without a network limit
    foretold_step_seconds: float | None
    money: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All rows, and at what losses are compared."""

    rows: tuple[ComparisonRow, ...]
    metric: str | None  # the loss that all scripts logged
    equal_seconds: float  # of the shortest run
    equal_steps: int  # of the run with the fewest
    target: Target | None
    unlimited_step_seconds: float | None  # of the run without a network limit


def compare(
    records: Sequence[Record],
    *,
    unlimited: Record | None = None,
    target: Target | None = None,
    prices: Prices | None = None,
    foretold: Sequence[float | None] | None = None,
) -> Comparison:
    """Compare records; `unlimited` is the run without a network limit, where one was made."""
    seconds = min(record["seconds"] for record in records)
    steps = min(record["steps"] for record in records)
    metric = _metric(records, seconds, steps)
    first = records[0]["seconds_per_step"]["median"]
    floor = unlimited["seconds_per_step"]["median"] if unlimited else None
    rows = [
        _row(record, metric, seconds, steps, first, floor, target, prices or Prices(), told)
        for record, told in zip(records, foretold or [None] * len(records), strict=True)
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
    told: float | None,
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
        foretold_step_seconds=told,
        money=prices.of(record, reached if reached is not None else record["seconds"]),
    )


def _metric(records: Sequence[Record], seconds: float, steps: int) -> str | None:
    """The loss that all logged early enough to be compared; a validation at a run's end alone comes after the others'
    limits. Else the one that all logged at all."""
    logged = [name for name in LOSSES if all(name in record["metrics"] for record in records)]
    limits = ((1, seconds), (0, steps))

    def in_time(name: str) -> bool:
        return all(value_until(record, name, *limit) is not None for record in records for limit in limits)

    return next(filter(in_time, logged), logged[0] if logged else None)


def value_until(record: Record, metric: str | None, column: int, limit: float) -> float | None:
    """A metric's value at a limit: column 0 counts in steps, 1 in seconds."""
    points: Sequence[Any] = record["metrics"].get(metric, ()) if metric else ()
    seen = [point[2] for point in points if point[column] <= limit + 1e-9 and point[2] is not None]
    if not seen:
        return None
    return float(seen[-1]) if metric == "validation_loss" else mean_of(seen[-SMOOTHED_POINTS:])


def loss_at(record: Record, metric: str | None, steps: float) -> float:
    """The loss after so many steps; infinite where the last one was not finite, or none was logged until then."""
    points = [point for point in record["metrics"].get(metric, ()) if point[0] <= steps] if metric else []
    loss = value_until(record, metric, 0, steps) if points and points[-1][2] is not None else None
    return inf if loss is None or not isfinite(loss) else loss


def final_loss(record: Record) -> float:
    """The validation loss at the end, else the training loss; infinite where it is not finite."""
    return loss_at(record, next((each for each in LOSSES if each in record["metrics"]), None), inf)


def seconds_to(record: Record, target: Target | None) -> float | None:
    """When a metric first reached its target; None where it did not."""
    points = record["metrics"].get(target.metric, ()) if target else ()
    return next((point[1] for point in points if target and target.reached(point[2])), None)
