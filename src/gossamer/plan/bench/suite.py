"""Benchmark suite: times all rows in one interleaved run, and compares them with copying and adding."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gossamer.algorithms.compressors import Compressor
from gossamer.plan.bench.interleave import interleave, spread
from gossamer.plan.bench.workloads import ADD, COPY, Workload, bucket, places, products, rows_of, yardsticks

RANK = 4  # of the PowerSGD with timed matrix products


@dataclass(frozen=True, kw_only=True)
class BenchmarkResult:
    """Measurement of one part of a row."""

    subject: str  # a compressor or yardstick
    kernels: str  # "native" or "reference"
    elements: int
    tensors: int
    payloads: int  # number of decoded payloads
    entries: int  # of a sparse payload
    part: str  # encoding, decoding or the whole
    least_bytes: int  # minimum bytes to move
    seconds: tuple[float, ...]  # by round
    median_seconds: float
    spread: float  # interquartile range of the seconds over the median
    gradient_bytes_per_second: float
    copy_ratio: float  # time per element relative to tensor.copy_
    add_rate_share: float  # time of the minimum bytes at torch.add's rate, over the measured time


def build(compressors: Sequence[Compressor], elements: int, note: Callable[[str], None]) -> list[Workload]:
    """Every row for a bucket of about `elements`; `note` is called with the row in preparation."""
    layout = bucket(elements)
    rows = [*yardsticks(layout), *places(layout), products(layout, RANK)]
    for compressor in compressors:
        note(repr(compressor))
        rows += rows_of(compressor, layout)
    return rows


def run_benchmarks(rows: Sequence[Workload], rounds: int, tick: Callable[[str], None]) -> list[BenchmarkResult]:
    """Run every row once per round, so that all see the same machine."""
    timers = {place: row.timer for place, row in enumerate(rows)}
    found = interleave(timers, rounds, lambda place: tick(f"{rows[place].subject}, {rows[place].kernels}"))
    rates = dict(_rates(rows, found))
    return [
        _measured(row, part, [seconds[number] for seconds in found[place]], rates)
        for place, row in enumerate(rows)
        for number, part in enumerate(row.parts)
    ]


def _rates(rows: Sequence[Workload], found: dict[int, list[Sequence[float]]]) -> Iterator[tuple[str, float]]:
    """Bytes per second of the yardsticks."""
    for place, row in enumerate(rows):
        if row.subject in (COPY, ADD):
            yield row.subject, row.parts[0][1] / statistics.median(seconds[0] for seconds in found[place])


def _measured(
    row: Workload, part: tuple[str, int], seconds: Sequence[float], rates: dict[str, float]
) -> BenchmarkResult:
    name, least_bytes = part
    median = statistics.median(seconds)
    gradient_bytes = 4 * row.layout.numel
    return BenchmarkResult(
        subject=row.subject,
        kernels=row.kernels,
        elements=row.layout.numel,
        tensors=len(row.layout),
        payloads=row.payloads,
        entries=row.entries,
        part=name,
        least_bytes=least_bytes,
        seconds=tuple(seconds),
        median_seconds=median,
        spread=spread(seconds),
        gradient_bytes_per_second=gradient_bytes / median,
        copy_ratio=median * rates[COPY] / (2 * gradient_bytes),
        add_rate_share=least_bytes / rates[ADD] / median,
    )
