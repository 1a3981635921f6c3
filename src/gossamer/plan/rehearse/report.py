"""Rehearsal report: one row per recipe, as a table and as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gossamer.base.units import bytes_text, seconds_text, share_text
from gossamer.observe.record import Record, network_text
from gossamer.plan.estimate.step_time import StepTimeEstimate
from gossamer.plan.rehearse.model_shapes import Shapes
from gossamer.version import __version__

BUSY_SHARE, LATE_SHARE = 0.5, 0.02  # of all cores, of a step; beyond them, workers disturb each other
HEADINGS = ("recipe", "step", "estimate", "ratio", "waiting", "encode", "wire", "decode", "sent per step")


@dataclass(frozen=True, kw_only=True)
class RehearsalPlan:
    """Settings of the rehearsal of all recipes."""

    shapes: Shapes
    step_seconds: float  # of one step without communication
    forward_share: float  # of a step, before its backward pass
    workers: int
    network: str | None  # None: this machine, unlimited
    steps: int  # minimum


@dataclass(frozen=True, kw_only=True)
class RehearsalRow:
    """One recipe's rehearsal. Per step means per backward pass here, so that accumulating recipes are comparable."""

    recipe: str  # as written
    record: Record  # of its run
    estimate: StepTimeEstimate | None  # estimate before the run; None without a network
    passes: int = 1  # backward passes that make one step of the record

    @property
    def seconds_per_step(self) -> float:
        return float(self.record["seconds_per_step"]["median"]) / self.passes

    @property
    def estimated_seconds(self) -> float | None:
        return None if self.estimate is None else self.estimate.step_seconds / self.passes

    @property
    def comm_seconds(self) -> list[float]:
        """Seconds of encoding, on the network, and decoding."""
        spent = self.record["communication_seconds_per_step"]
        return [spent[part] / self.passes for part in ("encode", "wire", "decode")]

    @property
    def bytes_sent(self) -> float:
        return float(self.record["final"]["bytes_sent_per_step"]) / self.passes

    @property
    def waiting_share(self) -> float:
        waiting = float(self.record["waiting_seconds_per_step"])
        whole = waiting + self.record["compute_seconds_per_step"]
        return waiting / whole if whole else 0.0

    @property
    def busy_cores(self) -> float:
        """Number of cores that all workers together keep busy."""
        return float(
            self.record["workers"] * self.record["final"]["processor_seconds_per_step"] / self.seconds_per_step
        )

    @property
    def late_seconds(self) -> float:
        """Delay of the last gradient of a step beyond its scheduled time."""
        return float(self.record["final"]["late_seconds_per_step"])


def summary(plan: RehearsalPlan, rows: Sequence[RehearsalRow]) -> Iterator[str]:
    """The printed lines."""
    shapes = plan.shapes
    yield f"model     {shapes.title}"
    yield f"          {shapes.parameters:,} parameters in {len(shapes.gradients)} tensors"
    yield f"step      {seconds_text(plan.step_seconds)} alone, {share_text(plan.forward_share)} of it forward"
    network = next((network_text(row.record) for row in rows), None)
    yield f"workers   {plan.workers}, network {network or 'this machine, unlimited'}"
    yield ""
    yield from _table([HEADINGS, *(_cells(plan, row) for row in rows)])
    yield ""
    yield f"Encoding and decoding ran on the {os.cpu_count()} cores of this machine, which all workers share."
    yield from (_warning(row) for row in rows if _short_of_processors(plan, row))
    yield from filter(None, map(_missed, rows))


def _short_of_processors(plan: RehearsalPlan, row: RehearsalRow) -> bool:
    return row.busy_cores > BUSY_SHARE * (os.cpu_count() or 1) or row.late_seconds > LATE_SHARE * plan.step_seconds


def _warning(row: RehearsalRow) -> str:
    return (
        f"With {row.recipe} the cores were too few: workers kept {row.busy_cores:.2f} busy and woke "
        f"{seconds_text(row.late_seconds)} late in each step, so this row is slower than with a machine per worker."
    )


def _missed(row: RehearsalRow) -> str | None:
    """Message if the measured step time is outside the 80 % interval of its estimate."""
    if row.estimate is None or row.estimate.interval is None:
        return None
    if row.estimate.interval.holds(row.seconds_per_step * row.passes):
        return None
    measured = seconds_text(row.seconds_per_step * row.passes)
    return f"With {row.recipe} a step took {measured}, outside its estimate: {row.estimate}."


def _cells(plan: RehearsalPlan, row: RehearsalRow) -> tuple[str, ...]:
    return (
        row.recipe,
        seconds_text(row.seconds_per_step),
        "-" if row.estimated_seconds is None else seconds_text(row.estimated_seconds),
        f"{row.seconds_per_step / plan.step_seconds:.2f}",
        share_text(row.waiting_share),
        *map(seconds_text, row.comm_seconds),
        bytes_text(row.bytes_sent),
    )


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        yield "  ".join(cells)


def to_json(plan: RehearsalPlan, rows: Sequence[RehearsalRow]) -> dict[str, Any]:
    return {
        "gossamer": __version__,
        "model": plan.shapes.title,
        "parameters": plan.shapes.parameters,
        "tensors": len(plan.shapes.gradients),
        "step_seconds": plan.step_seconds,
        "forward_share": plan.forward_share,
        "workers": plan.workers,
        "network": plan.network,
        "rows": [
            {
                "recipe": row.recipe,
                "seconds_per_step": row.seconds_per_step,
                "ratio": row.seconds_per_step / plan.step_seconds,
                "waiting_share": row.waiting_share,
                "busy_cores": row.busy_cores,
                "late_seconds_per_step": row.late_seconds,
                "short_of_processors": _short_of_processors(plan, row),
                "bytes_sent_per_step": row.bytes_sent,
                "estimate": asdict(row.estimate) if row.estimate else None,
                "record": row.record,
            }
            for row in rows
        ],
    }
