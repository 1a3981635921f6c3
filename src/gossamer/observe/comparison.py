"""Comparison of records: step time, loss at equal time and equal steps, bytes, money."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import numpy as np

from gossamer.base.bounded_mean import mean_of
from gossamer.base.intervals import BATCHES, mean_estimate, sample_mean
from gossamer.observe.record import Record
from gossamer.observe.target import Target

HELD_OUT = ("validation_loss", "eval_loss", "val_loss")  # each value is a mean over the held-out data
LOSSES = (*HELD_OUT, "loss")  # the first one found is used
NO_LOSSES = {"packet", "packets", "scale", "scaler", "weight", "weights", "ratio", "rate", "gap", "spike", "spikes"}
SHARES = (0.05, 0.1, 0.2)  # last share of each run's steps over which a training loss is averaged
FEWEST_POINTS = BATCHES  # of each run within the share; else the next larger share is used
FEWEST_OF_INTERVAL = 3


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
class LossEstimate:
    """The loss of a recipe at a step or a second.

    value: the mean over its runs (seeds); infinite if one of them diverged. points: logged values in the mean of each
    run, the fewest of all runs. low, high: 95 % interval over the runs, or over the values of a single run's training
    loss; None if there are too few.
    """

    value: float
    points: int
    low: float | None = None
    high: float | None = None


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
    loss_at_equal_time: LossEstimate | None
    loss_at_equal_steps: LossEstimate | None
    seconds_to_target: float | None
    step_ratio: float  # seconds per step over the first row's
    unlimited_ratio: float | None  # over that of the run without a network limit
    estimated_step_seconds: float | None
    money: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All rows, and the time and step at which losses are compared."""

    rows: tuple[ComparisonRow, ...]
    metric: str | None  # the loss that all scripts logged
    last_share: float  # of each run's steps, over which a training loss is averaged
    equal_seconds: float  # of the shortest run
    equal_steps: int  # of the run with the fewest steps
    target: Target | None
    unlimited_step_seconds: float | None  # of the run without a network limit


def compare(
    records: Sequence[Record],
    *,
    repeats: Sequence[Sequence[Record]] | None = None,
    unlimited: Record | None = None,
    target: Target | None = None,
    prices: Prices | None = None,
    estimates: Sequence[float | None] | None = None,
) -> Comparison:
    """Compare records.

    The loss of a run is its last held-out loss up to a limit. A run without one has the mean of its training loss over
    the last share of its steps, the same share in all runs: 5 %, or 10 or 20 % if a run logged less than eight values
    in it.

    Args:
        records: of the runs to compare.
        repeats: for each of them, the records of other seeds; losses are means over the seeds.
        unlimited: the record of a run without a network limit; None without one.
        target: a metric and its bound, for the time to reach it.
        prices: for the cost of each run.
        estimates: estimated seconds of a step, for each record.

    Returns:
        A row for each record, with losses at the end of the shortest run.
    """
    rows = [[record, *others] for record, others in zip(records, repeats or [()] * len(records), strict=True)]
    runs = [run for row in rows for run in row]
    seconds = min(run["seconds"] for run in runs)
    steps = min(run["steps"] for run in runs)
    metric = loss_metric(runs, seconds, steps)
    share = last_share(runs, metric, ((1, seconds), (0, steps)))
    first = records[0]["seconds_per_step"]["median"]
    floor = unlimited["seconds_per_step"]["median"] if unlimited else None
    return Comparison(
        rows=tuple(
            _row(
                row[0],
                loss_at_equal_time=_estimate(row, metric, 1, seconds, share),
                loss_at_equal_steps=_estimate(row, metric, 0, steps, share),
                first=first,
                floor=floor,
                target=target,
                prices=prices or Prices(),
                predicted=predicted,
            )
            for row, predicted in zip(rows, estimates or [None] * len(rows), strict=True)
        ),
        metric=metric,
        last_share=share,
        equal_seconds=seconds,
        equal_steps=steps,
        target=target,
        unlimited_step_seconds=floor,
    )


def _row(
    record: Record,
    *,
    loss_at_equal_time: LossEstimate | None,
    loss_at_equal_steps: LossEstimate | None,
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
        loss_at_equal_time=loss_at_equal_time,
        loss_at_equal_steps=loss_at_equal_steps,
        seconds_to_target=reached,
        step_ratio=step_seconds / first if first else 1.0,
        unlimited_ratio=step_seconds / floor if floor else None,
        estimated_step_seconds=predicted,
        money=prices.of(record, reached if reached is not None else record["seconds"]),
    )


def is_loss(name: str) -> bool:
    """Whether a metric of this name is a training's loss, such as val_loss, policy_loss or train/loss, and not
    packet_loss or loss_scale."""
    words = set(re.findall(r"[a-z]+", name.lower()))
    return "loss" in words and words.isdisjoint(NO_LOSSES)


def loss_metric(records: Sequence[Record], seconds: float, steps: int) -> str | None:
    """The loss that all records have early enough to be compared, else one that all have at all. A loss logged only at
    the end of a run is later than the end of shorter runs."""
    logged = [name for name in LOSSES if all(name in record["metrics"] for record in records)]
    limits = ((1, seconds), (0, steps))

    def in_time(name: str) -> bool:
        return all(_points(record, name, *limit) for record in records for limit in limits)

    return next(filter(in_time, logged), logged[0] if logged else None)


def _points(record: Record, metric: str | None, column: int, limit: float) -> list[Any]:
    """The logged [step, seconds, value] up to a limit: column 0 is in steps, 1 in seconds."""
    points: Sequence[Any] = record["metrics"].get(metric, ()) if metric else ()
    return [point for point in points if point[column] <= limit + 1e-9]


def last_values(record: Record, metric: str | None, column: int, limit: float, share: float) -> list[float | None]:
    """The values that a loss is averaged over: the last one of a held-out loss, else those of the last share of the
    steps up to the limit. Returns None for each value that is not finite."""
    points = _points(record, metric, column, limit)
    if not points or metric in HELD_OUT:
        return [point[2] for point in points[-1:]]
    begin = (1 - share) * points[-1][0]
    return [point[2] for point in points if point[0] > begin or point is points[-1]]


def last_share(records: Sequence[Record], metric: str | None, limits: Sequence[tuple[int, float]]) -> float:
    """The smallest of SHARES in which each run logged FEWEST_POINTS values, else the largest."""

    def is_enough(share: float) -> bool:
        counts = (len(last_values(record, metric, *limit, share)) for record in records for limit in limits)
        return all(count >= FEWEST_POINTS for count in counts)

    return SHARES[0] if metric in HELD_OUT else next(filter(is_enough, SHARES), SHARES[-1])


def _estimate(
    runs: Sequence[Record], metric: str | None, column: int, limit: float, share: float
) -> LossEstimate | None:
    """The mean over the runs, with an interval over them; None if one logged no value by then."""
    values = [last_values(run, metric, column, limit, share) for run in runs]
    if not all(values):
        return None
    means = [_mean(each) for each in values]
    fewest = min(map(len, values))
    if not all(map(isfinite, means)):
        return LossEstimate(value=inf, points=fewest)
    sample = [value for value in values[0] if value is not None] if len(runs) == 1 else means
    return LossEstimate(value=mean_of(means), points=fewest, **_interval(sample, in_time=len(runs) == 1))


def _interval(values: Sequence[float], *, in_time: bool) -> dict[str, float]:
    """Bounds of a 95 % interval of the mean, {} if there are too few values. in_time: of successive steps."""
    if len(values) < (FEWEST_OF_INTERVAL if in_time else 2):
        return {}
    with np.errstate(all="ignore"):
        of_one_run = in_time and len(values) >= BATCHES
        found = mean_estimate(np.array(values, dtype=np.float64)) if of_one_run else sample_mean(values)
    bounds = found.interval()
    return {"low": bounds.low, "high": bounds.high} if isfinite(bounds.high - bounds.low) else {}


def _mean(values: Sequence[float | None]) -> float:
    """The mean of the finite values; infinite if the last one is not finite, so that a diverged run is seen."""
    if not values or values[-1] is None or not isfinite(values[-1]):
        return inf
    return mean_of(value for value in values if value is not None)


def loss_at(record: Record, metric: str | None, steps: float, share: float = SHARES[0]) -> float:
    """The loss after this many steps; infinite if the last one was not finite, or none was logged by then."""
    return _mean(last_values(record, metric, 0, steps, share))


def final_loss(record: Record) -> float:
    """The final held-out loss, else the training loss over the last share of the run; infinite if it is not finite."""
    metric = next((each for each in LOSSES if each in record["metrics"]), None)
    return loss_at(record, metric, inf, last_share([record], metric, [(0, inf)]))


def seconds_to(record: Record, target: Target | None) -> float | None:
    """Seconds until a metric first reached its target; None if it did not."""
    points = record["metrics"].get(target.metric, ()) if target else ()
    return next((point[1] for point in points if target and target.reached(point[2])), None)
