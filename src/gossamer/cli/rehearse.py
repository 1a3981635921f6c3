"""`gossamer rehearse`: runs recipes with a model that sleeps instead of computing, and sends real bytes."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from itertools import count
from pathlib import Path

import click

from gossamer.algorithms.recipes.recipe import Recipe, meaning, resolve
from gossamer.algorithms.strategies import AveragingStage, Stage
from gossamer.cli.console import echo, print_text
from gossamer.cli.emulation import enter
from gossamer.cli.options import FiniteRange, output_option
from gossamer.cli.program import RunsScript
from gossamer.cli.recipe_options import session_recipe
from gossamer.cli.run import run
from gossamer.comm.network import read_network
from gossamer.errors import GossamerError
from gossamer.launcher.job import MOST_WORKERS
from gossamer.observe.rank_record import warm_up
from gossamer.observe.record import Record, write
from gossamer.plan import rehearse as rehearsal
from gossamer.plan.estimate.step_time import estimate_step_time, is_predictable
from gossamer.plan.profile.profile_runs import profile_script
from gossamer.plan.rehearse.model_shapes import find_shapes
from gossamer.plan.rehearse.model_zoo import BUILT_IN
from gossamer.plan.rehearse.report import RehearsalPlan, RehearsalRow, summary, to_json

WORKER = Path(rehearsal.__file__).with_name("worker.py")
ENDLESS = 10**9  # steps; the profiler stops earlier
FORWARD_SHARE = 1 / 3  # backward has about twice the multiply-adds of forward


def _resolve_all(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> dict[str, Recipe]:
    """Recipes by their texts. Refuse two texts of the same recipe."""
    found: dict[str, Recipe] = {}
    for text in map(session_recipe, texts):
        recipe = resolve(text)
        if twin := next((other for other in found if meaning(other) == meaning(text)), None):
            raise click.BadParameter(f"{text} and {twin} are the same recipe, {recipe!r}. Leave out one of them.")
        _refuse_stages(recipe)
        found[text] = recipe
    return found


def _refuse_stages(recipe: Recipe) -> None:
    """Refuse recipes with several stages, since the last stage would begin only after all others; and a global batch,
    since a rehearsal makes equally many backward passes on every worker."""
    if recipe.strategy != recipe.strategy.among(1):
        raise click.BadParameter(
            f"{recipe.strategy!r} divides the backward passes among the workers, and a rehearsal makes equally many "
            "on each. Write EveryStep(accumulate=4), with the passes of a worker."
        )
    *before, lasting = recipe.strategy.stages
    if before:
        assert isinstance(lasting, AveragingStage)
        raise click.BadParameter(
            f"{recipe.strategy!r} has another strategy for {lasting.start:,} backward passes at first, and the times "
            f"would be mixed. Rehearse both separately: EveryStep() and {lasting.strategy!r}."
        )


@click.command(cls=RunsScript)
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
    type=FiniteRange(0, min_open=True),
    help="Compute time of one step.",
)
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    default=["Dense()"],
    callback=_resolve_all,
    help="One recipe; may be repeated.",
)
@click.option(
    "--workers", type=click.IntRange(1, MOST_WORKERS), default=4, show_default=True, help="Number of workers."
)
@click.option("--network", metavar="SPEC", help="Network between the workers, such as 1gbit,1ms.")
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=30,
    show_default=True,
    help="Minimum number of steps; rounded up to whole periods.",
)
@click.option(
    "--forward-share",
    type=FiniteRange(0, 1, max_open=True),
    default=FORWARD_SHARE,
    help="Fraction of a step before its backward pass.  [default: a third]",
)
@output_option("json", "Also write the results as JSON.")
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
    """Run recipes with a simulated model: workers sleep instead of computing, and send real bytes.

    A file of shapes is JSON, in forward order, [["name", [shape], share], ...]; share: the fraction of the backward
    pass after which this gradient is ready.
    """
    try:
        if network is not None:
            enter(read_network(network, workers), faults=())  # before anything is created
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
        if rows:  # also after a failure
            _show(plan, rows, json_file)


def _show(plan: RehearsalPlan, rows: Sequence[RehearsalRow], json_file: Path | None) -> None:
    for line in summary(plan, rows):
        echo(line)
    if json_file is not None:
        write(json_file, to_json(plan, rows))


@contextmanager
def _worker_arguments(plan: RehearsalPlan) -> Iterator[list[str]]:
    """Arguments of the worker script."""
    with tempfile.TemporaryDirectory(prefix="gossamer-rehearsal-") as folder:
        shapes = Path(folder) / "shapes.json"
        shapes.write_text(plan.shapes.to_json(), encoding="utf-8")
        yield [str(shapes), f"--step-seconds={plan.step_seconds}", f"--forward-share={plan.forward_share}"]


def _row(plan: RehearsalPlan, worker: Sequence[str], text: str, recipe: Recipe, which: str) -> RehearsalRow:
    """The row of one recipe: its estimate, then the run."""
    stage = recipe.strategy.steady_stage
    steps = _steps(plan.steps, stage)
    print_text(f"gossamer: rehearsing {text} ({which}), {steps} steps")
    estimated = None
    if plan.network is not None and is_predictable(recipe):
        measured = profile_script(WORKER, [*worker, f"--steps={ENDLESS}"], recipe, plan.workers, copies=plan.workers)
        asleep = replace(measured, crowded=False)  # compression does not slow a backward pass that sleeps
        estimated = estimate_step_time(recipe, asleep, read_network(plan.network, plan.workers), plan.workers)
    record = _record(plan, [*worker, f"--steps={steps}"], text)
    return RehearsalRow(recipe=text, record=record, estimate=estimated, passes=stage.passes_per_step)


def _steps(fewest: int, stage: Stage) -> int:
    """At least `fewest` steps that leave whole periods after the warm-up, with all their landings."""
    schedule, counted = stage.schedule, stage.passes_per_step  # accumulated passes are recorded once

    def suits(steps: int) -> bool:
        left = steps // counted - warm_up(steps // counted)
        whole = left % (schedule.period // counted) == 0 and steps % counted == 0
        return whole and left > 0 and steps >= schedule.period + schedule.delay

    return next(steps for steps in count(fewest) if suits(steps))


def _record(plan: RehearsalPlan, worker: Sequence[str], recipe: str) -> Record:
    """The record of a run of `gossamer run`."""
    with tempfile.TemporaryDirectory(prefix="gossamer-rehearsal-") as folder:
        record = Path(folder) / "record.json"
        options = ["--workers", str(plan.workers), "--recipe", recipe, "--json", str(record)]
        if plan.network is not None:
            options += ["--network", plan.network]
        try:
            with redirect_stdout(io.StringIO()):  # its closing table would interrupt this table
                run.main([*options, str(WORKER), *worker], standalone_mode=False)
        except SystemExit as end:
            if end.code:
                raise
        found: Record = json.loads(record.read_text(encoding="utf-8"))
    return found
