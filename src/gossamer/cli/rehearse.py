"""gossamer rehearse: what recipes would cost a model and a machine that are not here."""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any

import click

from gossamer import rehearsal
from gossamer.cli.emulation import enter
from gossamer.cli.options import output_option
from gossamer.cli.run import run
from gossamer.errors import GossamerError, RecipeError
from gossamer.estimate.profile_runs import measure
from gossamer.estimate.step_time import StepTimeEstimate, estimate_step_time, is_predictable
from gossamer.network import read_network
from gossamer.observe.record import Record, write
from gossamer.observe.recorder import warm_up
from gossamer.observe.units import bytes_text, seconds_text, share_text
from gossamer.recipes.recipe import Recipe, resolve
from gossamer.rehearsal.model_shapes import Shapes, find_shapes
from gossamer.rehearsal.model_zoo import BUILT_IN
from gossamer.strategies import AveragingStage, Stage
from gossamer.version import __version__

WORKER = Path(rehearsal.__file__).with_name("worker.py")
ENDLESS = 10**9  # steps; whoever measures ends them
FORWARD_SHARE = 1 / 3  # backward has about twice the multiply-adds of forward
BUSY_SHARE, LATE_SHARE = 0.5, 0.02  # of all cores, of a step; beyond, the workers hinder each other


@dataclass(frozen=True, kw_only=True)
class RehearsalPlan:
    """What is rehearsed with every recipe."""

    shapes: Shapes
    step_seconds: float
    forward_share: float
    workers: int
    network: str | None
    steps: int


def _resolve_all(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> dict[str, Recipe]:
    """By the text that was written; two that mean the same would be one row twice."""
    found: dict[str, Recipe] = {}
    for text in texts:
        try:
            recipe = resolve(text)
        except RecipeError as error:
            raise click.BadParameter(str(error)) from None
        if twin := next((other for other, known in found.items() if known == recipe), None):
            raise click.BadParameter(f"{text} and {twin} are the same recipe, {recipe!r}. Leave out one of them.")
        _refuse_stages(recipe)
        found[text] = recipe
    return found


def _refuse_stages(recipe: Recipe) -> None:
    """What lasts would be rehearsed only after all that comes before."""
    *before, lasting = recipe.strategy.stages
    if before:
        assert isinstance(lasting, AveragingStage)
        raise click.BadParameter(
            f"{recipe.strategy!r} does something else for {lasting.start:,} backward passes, and their times would mix "
            f"with those of what lasts. Rehearse the two apart: EveryStep() and {lasting.strategy!r}."
        )


def _check_finite(context: click.Context, option: click.Parameter, number: float) -> float:
    """Ranges let `nan` pass, which is neither below nor above anything."""
    if not isfinite(number):
        raise click.BadParameter(f"{number} is not a finite number")
    return number


@click.command()
@click.option(
    "--shapes",
    "where",
    required=True,
    metavar="NAME|FILE|SCRIPT",
    help=f"The model: {', '.join(BUILT_IN)}; a JSON file; or a script that attaches one (its ARGS after --).",
)
@click.option(
    "--step-seconds",
    required=True,
    type=click.FloatRange(0, min_open=True),
    callback=_check_finite,
    help="What one step takes without talking.",
)
@click.option(
    "--recipe", "recipes", multiple=True, default=["Dense()"], callback=_resolve_all, help="Any number of them."
)
@click.option("--workers", type=click.IntRange(1), default=4, show_default=True, help="How many take part.")
@click.option("--network", metavar="SPEC", help="What lies between them, such as 1gbit,1ms.")
@click.option("--steps", type=click.IntRange(1), default=30, show_default=True, help="At least, whole periods.")
@click.option(
    "--forward-share",
    type=click.FloatRange(0, 1, max_open=True),
    callback=_check_finite,
    default=FORWARD_SHARE,
    help="The part of a step before its backward pass.  [default: a third]",
)
@output_option("json", "Also write it here.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
def rehearse(
    where: str,
    step_seconds: float,
    recipes: Mapping[str, Recipe],
    workers: int,
    network: str | None,
    steps: int,
    forward_share: float,
    json_file: Path | None,
    arguments: tuple[str, ...],
) -> None:
    """Run recipes on a model that is not here: workers sleep where they would compute, and send real bytes.

    A file of shapes is JSON, in forward order, [["name", [shape], share], ...]; share: the part of the backward pass
    that is over when this gradient appears.
    """
    try:
        if network is not None:
            enter(read_network(network, workers), faults=())  # before there is anything to leave behind
        shapes = find_shapes(where, arguments)
    except GossamerError as error:
        raise click.ClickException(str(error)) from error
    recipes = {text: resolve(text, workers) for text in recipes}
    plan = RehearsalPlan(
        shapes=shapes,
        step_seconds=step_seconds,
        forward_share=forward_share,
        workers=workers,
        network=network,
        steps=steps,
    )
    rows: list[RehearsalRow] = []
    try:
        with _worker_arguments(plan) as worker:
            for at, named in enumerate(recipes.items(), start=1):
                rows.append(_row(plan, worker, *named, f"{at} of {len(recipes)}"))
    finally:
        if rows:  # also those before one that failed
            _show(plan, rows, json_file)


def _show(plan: RehearsalPlan, rows: Sequence[RehearsalRow], json_file: Path | None) -> None:
    for line in _lines(plan, rows):
        click.echo(line, file=sys.stdout)  # or click writes UTF-8 where that is ASCII
    if json_file is not None:
        write(json_file, _report(plan, rows))


@dataclass(frozen=True, kw_only=True)
class RehearsalRow:
    """One recipe as it was written, what its run measured, and what had been foretold; that takes a network.

    Per step means per backward pass here, so that recipes that accumulate compare with others.
    """

    recipe: str
    record: Record
    foretold: StepTimeEstimate | None
    passes: int = 1  # backward passes that make one step of the record

    @property
    def seconds_per_step(self) -> float:
        return float(self.record["seconds_per_step"]["median"]) / self.passes

    @property
    def foretold_seconds(self) -> float | None:
        return None if self.foretold is None else self.foretold.step_seconds / self.passes

    @property
    def lane_seconds(self) -> list[float]:
        """Encoding, on the wire, decoding."""
        comm_thread = self.record["communication_seconds_per_step"]
        return [comm_thread[part] / self.passes for part in ("encode", "wire", "decode")]

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
        """How many cores all workers together kept busy."""
        return float(
            self.record["workers"] * self.record["final"]["processor_seconds_per_step"] / self.seconds_per_step
        )

    @property
    def late_seconds(self) -> float:
        """How long after its moment the last gradient of a step was there."""
        return float(self.record["final"]["late_seconds_per_step"])


@contextmanager
def _worker_arguments(plan: RehearsalPlan) -> Iterator[list[str]]:
    """What a worker's script is told."""
    with tempfile.TemporaryDirectory(prefix="gossamer-rehearsal-") as folder:
        shapes = Path(folder) / "shapes.json"
        shapes.write_text(plan.shapes.to_json(), encoding="utf-8")
        yield [str(shapes), f"--step-seconds={plan.step_seconds}", f"--forward-share={plan.forward_share}"]


def _row(plan: RehearsalPlan, worker: Sequence[str], text: str, recipe: Recipe, which: str) -> RehearsalRow:
    """Foretold before it is measured."""
    stage = recipe.strategy.steady_stage
    steps = _steps(plan.steps, stage)
    click.echo(f"gossamer: rehearsing {text} ({which}), {steps} steps", err=True)
    foretold = None
    if plan.network is not None and is_predictable(recipe):
        measured = measure(WORKER, [*worker, f"--steps={ENDLESS}"], recipe, plan.workers, copies=plan.workers)
        asleep = replace(measured, crowded=False)  # compressing slows no backward pass that only sleeps
        foretold = estimate_step_time(recipe, asleep, read_network(plan.network, plan.workers), plan.workers)
    record = _record(plan, [*worker, f"--steps={steps}"], text)
    return RehearsalRow(recipe=text, record=record, foretold=foretold, passes=stage.passes_per_step)


def _steps(fewest: int, stage: Stage) -> int:
    """So many that what is left after warming up is whole periods, with everything in them that they have."""
    schedule, counted = stage.schedule, stage.passes_per_step  # what accumulates is recorded once for so many passes

    def suits(steps: int) -> bool:
        left = steps // counted - warm_up(steps // counted)
        whole = left % (schedule.period // counted) == 0 and steps % counted == 0
        return whole and left > 0 and steps >= schedule.period + schedule.delay

    return next(steps for steps in count(fewest) if suits(steps))


def _record(plan: RehearsalPlan, worker: Sequence[str], recipe: str) -> Record:
    """Run by the door through which a script's runs go."""
    with tempfile.TemporaryDirectory(prefix="gossamer-rehearsal-") as folder:
        record = Path(folder) / "record.json"
        options = ["--workers", str(plan.workers), "--recipe", recipe, "--json", str(record)]
        if plan.network is not None:
            options += ["--network", plan.network]
        try:
            with redirect_stdout(io.StringIO()):  # its closing table would come between the rows of ours
                run.main([*options, str(WORKER), *worker], standalone_mode=False)
        except SystemExit as end:
            if end.code:
                raise
        found: Record = json.loads(record.read_text(encoding="utf-8"))
    return found


def _lines(plan: RehearsalPlan, rows: Sequence[RehearsalRow]) -> Iterator[str]:
    shapes = plan.shapes
    yield f"model     {shapes.title}"
    yield f"          {shapes.parameters:,} parameters in {len(shapes.gradients)} tensors"
    yield f"step      {seconds_text(plan.step_seconds)} alone, {share_text(plan.forward_share)} of it forward"
    yield f"workers   {plan.workers}, network {plan.network or 'this machine, unlimited'}"
    yield ""
    yield from _table([HEADINGS, *(_cells(plan, row) for row in rows)])
    yield ""
    yield f"Encoding and decoding ran on the {os.cpu_count()} cores of this machine, which all workers share."
    yield from (_warning(row) for row in rows if _short_of_processors(plan, row))


def _short_of_processors(plan: RehearsalPlan, row: RehearsalRow) -> bool:
    return row.busy_cores > BUSY_SHARE * (os.cpu_count() or 1) or row.late_seconds > LATE_SHARE * plan.step_seconds


def _warning(row: RehearsalRow) -> str:
    return (
        f"With {row.recipe} they were too few: workers kept {row.busy_cores:.2f} busy and woke "
        f"{seconds_text(row.late_seconds)} late in each step, so that row is slower than on machines of their own."
    )


HEADINGS = ("recipe", "step", "foretold", "ratio", "waiting", "encode", "wire", "decode", "sent per step")


def _cells(plan: RehearsalPlan, row: RehearsalRow) -> tuple[str, ...]:
    return (
        row.recipe,
        seconds_text(row.seconds_per_step),
        "-" if row.foretold_seconds is None else seconds_text(row.foretold_seconds),
        f"{row.seconds_per_step / plan.step_seconds:.2f}",
        share_text(row.waiting_share),
        *map(seconds_text, row.lane_seconds),
        bytes_text(row.bytes_sent),
    )


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Text to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        yield "  ".join(cells)


def _report(plan: RehearsalPlan, rows: Sequence[RehearsalRow]) -> dict[str, Any]:
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
                "foretold": asdict(row.foretold) if row.foretold else None,
                "record": row.record,
            }
            for row in rows
        ],
    }
