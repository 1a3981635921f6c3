"""`gossamer simulate`: trains all workers of a script in this process, or prices a model's shapes, in virtual time."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import click

from gossamer.algorithms.recipes.recipe import Recipe, resolve
from gossamer.base import system
from gossamer.base.figures import COLORS
from gossamer.base.json_text import json_text
from gossamer.base.units import bytes_text, count_text, seconds_text, share_text, short
from gossamer.cli.compare import NO_LOSS, check_plot, different_recipes
from gossamer.cli.console import ShowText, echo, print_text, progress, table, wide_console
from gossamer.cli.options import FiniteRange, output_option, speeds_option
from gossamer.cli.program import ScriptCommand, ScriptPath, refuse_given, with_misplaced_options
from gossamer.cli.script_terms import register_terms
from gossamer.comm.network import read_network
from gossamer.events import Attached
from gossamer.observe.comparison import is_loss
from gossamer.observe.panels import Curve, Panel, drawable, shortened
from gossamer.observe.plot import plot_panel
from gossamer.plan.advise.prices import StepPricer
from gossamer.plan.estimate.step_cost import StepCost, step_cost
from gossamer.plan.estimate.step_time import is_predictable
from gossamer.plan.estimate.worker_speeds import MOST_WORKERS, read_speeds
from gossamer.plan.estimate.workload_profile import WorkloadProfile
from gossamer.plan.profile.profile_runs import assume_profile, profile_script
from gossamer.plan.profile.synthetic_shapes import assumed, attached_to
from gossamer.plan.profile.user_script import attached_by
from gossamer.plan.rehearse.model_shapes import find_shapes
from gossamer.plan.simulate import ForecastClock, JobProgress, NetworkSchedule, SimulatedJob
from gossamer.version import __version__

WIDTH = 140  # columns of a table in a file
REPORT_EVERY_SECONDS = 10.0  # without a terminal
CALL_SECONDS = 0.5  # of simulation between lines of progress
OF_TRAINING = "steps", "seconds", "servers", "learning_rate_factor", "picture_file"
UNTRAINED = (
    "{option} requires a SCRIPT: with --shapes or --parameters nothing is trained, and one step is priced. Omit it."
)
COLUMNS = ("recipe", "steps", "first loss", "last loss", "virtual time", "a step", "sent a step")
USED_SPEED = "used speed"  # samples per second, as a part of those of the same workers without communication


@dataclass(frozen=True)
class SimulationEnd:
    """Limits of the simulation of one recipe; None for no limit."""

    steps: int | None
    seconds: float | None

    def reached(self, found: JobProgress, asked: int) -> bool:
        return found.ended or found.steps < asked or found.steps >= (self.steps or math.inf)


@click.command(
    "simulate",
    cls=ScriptCommand,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--workers", type=click.IntRange(1, MOST_WORKERS), required=True, help="Number of workers, all in this process."
)
@click.option(
    "--network",
    "schedule_text",
    required=True,
    metavar="SPEC",
    help='RATE[,ROUND_TRIP][,loss=P] per host, or a TOML file; or a schedule: "100mbit,20ms; 10mbit at 30s".',
)
@click.option(
    "--recipe", "recipes", multiple=True, required=True, callback=different_recipes, help="Repeat it for each recipe."
)
@click.option("--steps", type=click.IntRange(1), help="End after this many steps.  [default: the script's]")
@click.option("--seconds", type=FiniteRange(0, min_open=True), help="End after this virtual time.")
@click.option(
    "--step-seconds",
    type=FiniteRange(0, min_open=True),
    help="Compute time of a step on one worker; replaces the measurement.",
)
@speeds_option
@click.option(
    "--servers",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Parameter servers on hosts after those of the workers; 0: workers host them.",
)
@click.option("--learning-rate-factor", type=FiniteRange(0, min_open=True), default=1.0, show_default=True)
@click.option("--shapes", metavar="NAME|FILE", help="No training, up to 100,000 workers: a model, as in `rehearse`.")
@click.option("--parameters", type=click.IntRange(1, 10**12), help="No training: a transformer of this size.")
@output_option("json", "Write the results and curves as JSON.")
@output_option("picture", "Draw the losses over virtual time (PNG).")
@click.argument("script", required=False, type=ScriptPath())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def simulate_command(
    workers: int,
    schedule_text: str,
    recipes: tuple[str, ...],
    steps: int | None,
    seconds: float | None,
    step_seconds: float | None,
    speeds_text: str | None,
    servers: int,
    learning_rate_factor: float,
    shapes: str | None,
    parameters: int | None,
    json_file: Path | None,
    picture_file: Path | None,
    script: Path | None,
    arguments: tuple[str, ...],
) -> None:
    """Train SCRIPT with all its workers in this process, with every --recipe in turn. Arguments after SCRIPT are passed
    to it.

    Losses, bytes and checkpoints are real. Time is virtual: each step takes its estimated time on the network. With
    --shapes or --parameters instead of SCRIPT nothing is trained: bytes, seconds and the busiest machine.
    """
    if sum(each is not None for each in (script, shapes, parameters)) != 1:
        raise click.UsageError(
            "pass exactly one of: a SCRIPT that trains, --shapes resnet50, or --parameters 100000000"
        )
    speeds = () if speeds_text is None else read_speeds(speeds_text, workers)
    if script is None:
        refuse_given(click.get_current_context(), OF_TRAINING, UNTRAINED)
        if step_seconds is None:
            raise click.UsageError("shapes have no compute time. Add --step-seconds 0.3, the compute time of a step")
        title, model = _model(shapes, parameters)
        print_costs(
            recipes,
            model=model,
            title=title,
            workers=workers,
            network=schedule_text,
            step_seconds=step_seconds,
            speeds=speeds,
            json_file=json_file,
        )
        return
    if picture_file is not None:
        check_plot()
    register_terms(script, arguments, recipes)
    schedule = NetworkSchedule.read(schedule_text, workers + servers)
    clock = ForecastClock(_profiler(script, arguments, workers, step_seconds, speeds), schedule, workers)
    runs: list[dict[str, Any]] = []
    try:
        for recipe in recipes:
            job = SimulatedJob(
                script,
                arguments,
                recipe,
                workers,
                clock=clock,
                learning_rate_factor=learning_rate_factor,
                servers=servers,
                output=sys.stderr,
            )
            try:
                found = _simulate(job, recipe, SimulationEnd(steps, seconds), arguments)
                runs.append({"recipe": recipe, **_record(found, job)})
            finally:
                job.close()
    finally:
        if runs:  # also after a failure
            _show(recipes[: len(runs)], runs, with_speeds=bool(speeds))
            if json_file is not None:
                about = {"gossamer": __version__, "script": str(script), "arguments": arguments, "workers": workers}
                about |= {"speeds": speeds, "network": schedule_text, "runs": runs}
                json_file.write_text(json_text(about, indent=2) + "\n", encoding="utf-8")
            if picture_file is not None:
                plot_panel(_panel(runs), picture_file)
    if any(run["failure"] for run in runs):
        raise SystemExit(1)


def _profiler(
    script: Path, arguments: Sequence[str], workers: int, step_seconds: float | None, speeds: Sequence[float]
) -> Callable[[Recipe], WorkloadProfile]:
    """Profile of a step on a machine like this one for a worker of speed 1: timed here, or with the given compute
    time."""

    def measured(recipe: Recipe) -> WorkloadProfile:
        if step_seconds is None:
            return profile_script(script, arguments, recipe, workers)
        return assume_profile(attached_by(script, arguments, recipe), recipe, step_seconds, workers)

    def profile(recipe: Recipe) -> WorkloadProfile:
        if is_predictable(recipe):
            return replace(measured(recipe), speeds=speeds)
        return StepPricer(replace(measured(resolve(None)), speeds=speeds), workers).profile(recipe)

    return profile


# -- one recipe --------------------------------------------------------------------------------------------------------


def _simulate(job: SimulatedJob, recipe: str, end: SimulationEnd, arguments: Sequence[str]) -> JobProgress:
    with progress(f"{recipe}: timing a step", REPORT_EVERY_SECONDS) as show:
        memory = job.begin()
    if memory is not None:
        print_text(f"gossamer: {recipe}: memory {memory}")
    with progress(f"{recipe}: the first step", REPORT_EVERY_SECONDS) as show:
        found = _advance(job, recipe, end, show)
    if found.failure is not None:
        print_text(f"{recipe}: {with_misplaced_options(found.failure, arguments)}", error=True)
    elif found.ended and found.steps < (end.steps or 0):
        print_text(f"gossamer: {recipe}: the script ended after {found.steps} steps, before the requested {end.steps}")
    elif not found.steps and end.seconds:
        limit = seconds_text(end.seconds)
        print_text(f"gossamer: {recipe}: its first round takes longer than {limit} of virtual time. Raise --seconds")
    return found


def _advance(job: SimulatedJob, recipe: str, end: SimulationEnd, show: ShowText) -> JobProgress:
    """Simulate until the end, by as many steps at a time as take CALL_SECONDS."""
    began, found, more = time.monotonic(), job.progress, 1
    while True:
        called = time.monotonic()
        asked = min(found.steps + more, end.steps or sys.maxsize)
        found = job.advance(steps=asked, seconds=end.seconds)
        if end.reached(found, asked):
            return found
        show(_standing(recipe, found, end, time.monotonic() - began))
        more = max(1, min(2 * more, round(more * CALL_SECONDS / max(time.monotonic() - called, 1e-6))))


def _standing(recipe: str, found: JobProgress, end: SimulationEnd, passed_seconds: float) -> str:
    shares = [found.steps / end.steps if end.steps else 0.0, found.seconds / end.seconds if end.seconds else 0.0]
    left = passed_seconds * (1 / max(shares) - 1) if any(shares) else None
    of = f" of {end.steps}" if end.steps else ""
    points = _loss(found.metrics)
    loss = f", loss {short(points[-1][2])}" if points else ""
    ready = f"; ready in about {seconds_text(left)}" if left is not None else ""
    return f"{recipe}: step {found.steps}{of}{loss}, {seconds_text(found.seconds)} of virtual time{ready}"


def _loss(metrics: Mapping[str, Sequence[tuple[int, float, float]]]) -> Sequence[tuple[int, float, float]]:
    name = next((name for name in ("loss", *metrics) if is_loss(name) and name in metrics), None)
    return metrics[name] if name is not None else ()


# -- all of them -------------------------------------------------------------------------------------------------------


def _record(found: JobProgress, job: SimulatedJob) -> dict[str, Any]:
    steps = max(1, found.steps)
    return {
        "resolved": found.recipe,
        "steps": found.steps,
        "seconds": found.seconds,
        "seconds_per_step": found.seconds / steps,
        "bytes_sent_per_step": found.bytes_sent / steps,
        "parts": found.parts,
        "speed_use": found.speed_use,
        "metrics": found.metrics,
        "ended": found.ended,
        "failure": found.failure,
        "diverged": found.diverged,
        "digest": found.digest,
        "peak_resident_bytes": system.peak_resident_bytes(),
        "foreseen_memory_bytes": job.memory.total_bytes if job.memory is not None else None,
    }


def _show(recipes: Sequence[str], runs: Sequence[Mapping[str, Any]], *, with_speeds: bool) -> None:
    shown = table((*COLUMNS, *[USED_SPEED] * with_speeds), left=("recipe",), no_wrap=("recipe",))
    for recipe, run in zip(recipes, runs, strict=True):
        points = _loss(run["metrics"])
        losses = [short(points[place][2]) if points else "-" for place in (0, -1)]
        times = [seconds_text(run[name]) if run["steps"] else "-" for name in ("seconds", "seconds_per_step")]
        use = ["-" if run["speed_use"] is None else f"{run['speed_use']:.2f}"] * with_speeds
        shown.add_row(recipe, str(run["steps"]), *losses, *times, bytes_text(run["bytes_sent_per_step"]), *use)
    console = wide_console(WIDTH)
    console.print(shown)
    if not any(_loss(run["metrics"]) for run in runs):
        console.print(f"\n{NO_LOSS}")


def _panel(runs: Sequence[Mapping[str, Any]]) -> Panel:
    curves = []
    for place, run in enumerate(runs):
        points = _loss(run["metrics"])
        seconds, losses = [point[1] for point in points], [drawable(point[2]) for point in points]
        curves.append(Curve(shortened(run["recipe"]), COLORS[place % len(COLORS)], seconds, losses))
    return Panel("loss over virtual time", "virtual seconds", "loss", curves)


HEADINGS = ("recipe", "seconds a step", "waiting", "sent by each", "busiest sends", "messages", "held to decode")
EXPLANATION = (
    "Bytes are payload, per step. Seconds are estimates for workers with these compute times, each on its own link; "
    "those with >= are a lower bound from computing and the link of the busiest machine. Held to decode: payloads of "
    "other workers that a worker keeps at once."
)
ModelFor = Callable[[Recipe], Attached]


def print_costs(
    recipes: Sequence[str],
    *,
    model: ModelFor,
    title: str,
    workers: int,
    network: str,
    step_seconds: float,
    speeds: Sequence[float] = (),
    json_file: Path | None = None,
) -> list[StepCost]:
    """Print a row for each recipe, also for those before one that fails.

    model: the Attached event of a session with a resolved recipe. Raises GossamerError for an invalid recipe or
    network, or too many unequal hosts to simulate.
    """
    there = read_network(network, workers)
    print_text(f"{title}, {seconds_text(step_seconds)} a step; {count_text(workers)} workers on {network}")
    found: list[StepCost] = []
    try:
        for text in recipes:
            began = perf_counter()
            recipe = resolve(text, workers)
            attached = model(recipe)
            profile = partial(_assumed, attached, recipe, step_seconds, workers, speeds)
            found.append(step_cost(recipe, attached, there, workers, step_seconds, profile, speeds))
            print_text(f"{text}: calculated in {seconds_text(perf_counter() - began)}")
    finally:
        if found:  # also after a failure
            _show_costs(recipes[: len(found)], found, json_file)
    return found


def _show_costs(texts: Sequence[str], found: Sequence[StepCost], json_file: Path | None) -> None:
    for line in cost_rows(texts, found):
        echo(line)
    echo(f"\n{EXPLANATION}")
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n", encoding="utf-8")


def _assumed(
    model: Attached, recipe: Recipe, step_seconds: float, workers: int, speeds: Sequence[float]
) -> WorkloadProfile:
    return replace(assume_profile(model, recipe, step_seconds, workers), speeds=speeds)


def cost_rows(texts: Sequence[str], found: Sequence[StepCost]) -> Iterator[str]:
    rows = [HEADINGS, *(cells(text, each) for text, each in zip(texts, found, strict=True))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        columns = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        yield "  ".join([first.ljust(widths[0]), *columns])


def cells(text: str, cost: StepCost) -> tuple[str, ...]:
    bound = ">= " * cost.at_least
    return (
        text,
        bound + seconds_text(cost.seconds),
        bound + share_text(cost.waiting_share),
        bytes_text(cost.bytes_sent),
        bytes_text(cost.load.bytes_sent),
        count_text(cost.load.messages),
        bytes_text(cost.load.received_bytes),
    )


def _model(shapes: str | None, parameters: int | None) -> tuple[str, ModelFor]:
    """The title and the model of --shapes or --parameters."""
    if parameters is not None:
        return f"{count_text(parameters)} parameters like a transformer's", partial(assumed, parameters)
    found = find_shapes(str(shapes), ())
    by_name = {each.name: each.shape for each in found.gradients}
    return found.title, partial(attached_to, by_name)
