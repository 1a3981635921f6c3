"""`gossamer study`: trains every recipe with every seed, and reports each quantity with an interval over the seeds."""

from __future__ import annotations

import csv
import io
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import click

from gossamer.algorithms.recipes import retained_benefit
from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.intervals import ConfidenceInterval
from gossamer.base.units import bytes_text, seconds_text, short
from gossamer.cli.compare import (
    NO_LOSS,
    SEED,
    check_placeholders,
    check_plot,
    different_recipes,
    failure_text,
    filled_in,
    latex_text,
    print_table,
    run_for_json,
    target_option,
)
from gossamer.cli.console import progress, wide_console
from gossamer.cli.options import FiniteRange, output_option
from gossamer.cli.program import ScriptCommand, ScriptPath
from gossamer.cli.script_terms import register_terms
from gossamer.cli.worker import SECONDS as SECONDS_LIMIT
from gossamer.comm.network import read_network
from gossamer.comm.runtime.signal_handlers import handling
from gossamer.launcher.job import MOST_WORKERS
from gossamer.observe.plot import plot_metrics
from gossamer.observe.record import Record, network_text, write
from gossamer.observe.target import Target
from gossamer.plan.profile.profile_runs import profile_script
from gossamer.plan.simulate import NetworkSchedule
from gossamer.plan.study import (
    BYTES,
    SECONDS,
    STEPS,
    Quantity,
    RunFailure,
    RunStore,
    StudyRow,
    StudyRun,
    StudySummary,
    metric_quantity,
    read_record,
    summarize,
    train_missing,
)

WIDTH = 160  # columns of a table in a file
MOST_METRICS = 4  # in the table, the loss first; files have all
PLAIN_SECONDS = 10.0  # between lines of progress without a terminal
LABEL = re.compile(r"\s*([^=()\[\]{}'\"]+?)\s*=\s*(.+)", re.DOTALL)  # small=Int8(), but not TopK(density=0.1)


def _labelled(context: click.Context, option: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    """Recipes by label: the part before "=", else the text as written. Refuses equal labels and equal recipes."""
    found = [match.groups() if (match := LABEL.fullmatch(text)) else (text, text) for text in texts]
    labels = [label for label, _ in found]
    if double := next((label for label in labels if labels.count(label) > 1), None):
        raise click.BadParameter(f'two recipes have the label {double!r}. Name each, such as --recipe "small=Int8()"')
    return dict(zip(labels, different_recipes(context, option, tuple(text for _, text in found)), strict=True))


@click.command(
    "study", cls=ScriptCommand, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    required=True,
    callback=_labelled,
    metavar="[LABEL=]RECIPE",
    help="Repeat it for each recipe; differences are to the first one.",
)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True, help=f"{SEED} in ARGUMENTS is 0, 1, ...")
@click.option(
    "--workers", type=click.IntRange(2, MOST_WORKERS), default=2, show_default=True, help="Number of workers."
)
@click.option("--network", metavar="SPEC", help="RATE[,ROUND_TRIP][,loss=P] per host, or a TOML file.")
@click.option("--real-time", is_flag=True, help="Run processes and measure time.  [default: virtual time]")
@click.option("--steps", type=click.IntRange(1), help="End each run after this many steps; virtual time only.")
@click.option("--seconds", type=FiniteRange(0, min_open=True), help="End each run after this time.")
@click.option("--step-seconds", type=FiniteRange(0, min_open=True), help="Compute time of a step; virtual only.")
@target_option('Also report the time to this target: "validation_loss<2.2".', name="--target")
@click.option("--jobs", type=click.IntRange(1), help="Runs at once.  [default: as many as fit; real time: 1]")
@click.option(
    "--store",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of finished runs.  [default: studies/ and the script's name]",
)
@output_option("csv", "Write a row for each recipe and quantity.")
@output_option("tex", "Write the table for LaTeX, with booktabs.")
@output_option("plot", "Draw all metrics over time and bytes (PNG).")
@click.argument("script", type=ScriptPath())
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def study_command(
    recipes: Mapping[str, str],
    seeds: int,
    workers: int,
    network: str | None,
    real_time: bool,
    steps: int | None,
    seconds: float | None,
    step_seconds: float | None,
    target: Target | None,
    jobs: int | None,
    store: Path | None,
    csv_file: Path | None,
    tex_file: Path | None,
    plot_file: Path | None,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Train SCRIPT with every --recipe and every seed, with intervals over the seeds.

    Reports loss, bytes and seconds with 95 % intervals. Arguments after SCRIPT are passed to it. Each finished run is
    stored: the same command continues an interrupted study, and trains only missing runs if recipes or seeds are added.
    Time is virtual, as in `gossamer simulate`, or real, as in `gossamer compare`.
    """
    if plot_file is not None:
        check_plot()
    check_placeholders(arguments, seeds, ())
    _check_time(real_time, network, steps, step_seconds, workers)
    first = filled_in(arguments, seed=0)
    register_terms(script, first, recipes.values())
    kept = RunStore(store or Path("studies") / script.stem, script)
    _check_folder(kept.folder)
    console = wide_console(WIDTH)
    if real_time:
        words = ["run", "--workers", str(workers), *(["--network", network] if network else [])]
        limits = ((SECONDS_LIMIT, str(seconds)),) if seconds else ()
    else:
        step_seconds = step_seconds or _step_seconds(kept, script, first, workers)
        words = ["simulate", "--workers", str(workers), "--network", str(network), "--step-seconds", repr(step_seconds)]
        words += [*(["--steps", str(steps)] if steps else []), *(["--seconds", repr(seconds)] if seconds else [])]
        limits = (("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1")),)
    files = _network_files(network, workers)
    runs = [
        StudyRun(
            label=label,
            recipe=recipe,
            seed=seed,
            command=(*words, "--recipe", recipe, str(script), *filled_in(arguments, seed=seed)),
            environment=limits,
            files=files,
        )
        for label, recipe in recipes.items()
        for seed in range(seeds)
    ]
    trainer = CommandTrainer(workers=workers, step_seconds=None if real_time else step_seconds)
    with _ended_by_signal(), progress(f"{len(runs)} runs", PLAIN_SECONDS) as show_line:
        at_once = jobs or (1 if real_time else None)
        records, failures = train_missing(_first_of_each(runs), kept, trainer, jobs=at_once, show=show_line)
    finished = {run: records[run] for run in runs if run in records}
    if finished:
        summary = summarize(finished, workers, target)
        header, lines = table_text(summary)
        _show(summary, header, lines, seeds, console)
        if real_time and (emulated := network_text(next(iter(finished.values())))):
            console.print(f"network: {emulated}", markup=False)
        console.print(f"runs: {kept.folder}", markup=False, style="dim")
        _write(summary, header, lines, finished, csv_file, tex_file, plot_file)
    if failures:
        texts = "\n".join(f"{run.label}, seed {run.seed}: {text}" for run, text in failures.items())
        raise click.ClickException(f"{len(failures)} of {len(runs)} runs failed and are missing above:\n{texts}")


def _check_time(
    real_time: bool, network: str | None, steps: int | None, step_seconds: float | None, workers: int
) -> None:
    if real_time and (steps or step_seconds):
        raise click.UsageError(
            "--steps and --step-seconds belong to virtual time. In real time write --seconds 60, or pass the number of "
            "steps to the script"
        )
    if network is not None:
        read_network(network, workers) if real_time else NetworkSchedule.read(network, workers)
    elif not real_time:
        raise click.UsageError(
            "virtual time depends on the network. Describe it: --network 100mbit,20ms; or measure time: --real-time"
        )


def _check_folder(folder: Path) -> None:
    """Refuse a store that cannot be written, before a run is trained."""
    there = next(each for each in (folder, *folder.absolute().parents) if os.path.lexists(each))
    if not os.path.isdir(there) or not os.access(there, os.W_OK):
        raise click.UsageError(
            f"finished runs would be stored in {folder}, and {there} is not a writable folder. Write --store FOLDER"
        )


def _network_files(network: str | None, workers: int) -> tuple[Path, ...]:
    """The files of a network or a schedule of networks. Their content may change while their names stay."""
    changes = () if network is None else NetworkSchedule.read(network, workers).changes
    return tuple(Path(each.text) for _, each in changes if each.text.endswith(".toml"))


def _first_of_each(runs: Sequence[StudyRun]) -> list[StudyRun]:
    """Seed 0 of each recipe first, so that a recipe that fails is reported early."""
    return sorted(runs, key=lambda run: run.seed)


def _step_seconds(store: RunStore, script: Path, arguments: Sequence[str], workers: int) -> float:
    """Compute time of a step on one worker, measured once and stored: all runs of the study have the same clock."""
    file = store.file("step seconds", *arguments, workers)
    if (found := read_record(file)) is None:
        with progress("timing a step", PLAIN_SECONDS):
            profile = profile_script(script, arguments, resolve("Dense()", workers), workers)
        found = {"step_seconds": profile.compute_seconds}
        store.folder.mkdir(parents=True, exist_ok=True)
        write(file, found)
    return float(found["step_seconds"])


@contextmanager
def _ended_by_signal() -> Iterator[None]:
    """A termination signal raises SystemExit, so that runs in progress are ended, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    with handling(leave, signal.SIGTERM):
        yield


class CommandTrainer:
    """Trains by commands: `gossamer run` in real time, `gossamer simulate` in virtual time.

    step_seconds: compute time of a step in virtual time; None in real time.
    """

    def __init__(self, *, workers: int, step_seconds: float | None) -> None:
        self._workers, self._step_seconds = workers, step_seconds
        self.processes = workers if step_seconds is None else 1
        self._running: list[subprocess.Popen[str]] = []
        self._stopped = False

    def train(self, run: StudyRun, on_line: Callable[[str], None]) -> Record:
        ended = run_for_json(run.command, dict(run.environment), on_line, self._started)
        found = ended.content or {}
        if self._step_seconds is None:
            if ended.code or found.get("ended") != "finished":
                raise RunFailure(failure_text(run.recipe, ["gossamer", *run.command], ended.output))
            return {**found, "recipe": run.recipe}
        runs = found.get("runs") or [{}]
        if not runs[0] or (ended.code and not runs[0]["diverged"]):
            raise RunFailure(failure_text(run.recipe, ["gossamer", *run.command], ended.output))
        return self._virtual(run, runs[0])

    def _started(self, process: subprocess.Popen[str]) -> None:
        self._running.append(process)
        if self._stopped:
            process.terminate()

    def _virtual(self, run: StudyRun, found: Mapping[str, Any]) -> Record:
        """The record of a simulated run, with the fields that a real one has."""
        return {
            **found,
            "recipe": run.recipe,
            "workers": self._workers,
            "seconds_per_step": {"median": found["seconds_per_step"]},
            "compute_seconds_per_step": self._step_seconds,
            "bytes_sent_per_step": {"accounted": found["bytes_sent_per_step"]},
            "memory_bytes": {"peak_resident": found["peak_resident_bytes"]},
        }

    def stop(self) -> None:
        self._stopped = True
        for process in self._running:
            if process.poll() is None:
                process.terminate()


# -- output ------------------------------------------------------------------------------------------------------------


def value_text(found: ConfidenceInterval, show: Callable[[float], str] = short, missing: str = "diverged") -> str:
    """For a table: "2.41 ± 0.0123", with the half width of the interval; "2.41" without one or for a width of zero."""
    if not isfinite(found.value):
        return missing
    half = (found.high - found.low) / 2
    negligible = not isfinite(half) or half <= 1e-6 * abs(found.value)
    return show(found.value) if negligible else f"{show(found.value)} ± {show(half)}"


def table_text(summary: StudySummary) -> tuple[list[str], list[list[str]]]:
    """Header and rows, as text. Columns without a value in any row are left out."""
    lines = [_cells(row, summary) for row in summary.rows]
    header = [name for name in lines[0] if any(line[name] is not None for line in lines)]
    return header, [[line[name] or "-" for name in header] for line in lines]


def _cells(row: StudyRow, summary: StudySummary) -> dict[str, str | None]:
    found = row.quantities
    cells: dict[str, str | None] = {"recipe": row.label}
    for name in summary.metrics[:MOST_METRICS]:
        quantity = metric_quantity(name)
        cells[f"{quantity} at step {summary.equal_steps}"] = value_text(found[quantity].mean)
        difference = found[quantity].difference
        if name == summary.loss:
            cells["difference"] = None if difference is None else value_text(difference)
            cells["retained"] = None if row.retained is None else retained_benefit.text(row.retained)
    cells["steps"] = value_text(found[STEPS].mean, lambda count: f"{count:g}")
    cells["sent"] = value_text(found[BYTES].mean, bytes_text)
    cells["time"] = value_text(found[SECONDS].mean, seconds_text)
    if summary.target is not None:
        cells[f"to {summary.target}"] = value_text(found[str(summary.target)].mean, seconds_text, "not reached")
    return cells


def csv_text(summary: StudySummary) -> str:
    """CSV with a row for each recipe and quantity, in SI units. A missing value or bound is empty."""
    seeds = sorted({seed for row in summary.rows for each in row.quantities.values() for seed in each.values})
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    intervals = [f"{name}{end}" for name in ("mean", "difference", "retained") for end in ("", "_low", "_high")]
    writer.writerow(["label", "recipe", "quantity", *intervals, *(f"seed_{seed}" for seed in seeds)])
    for row in summary.rows:
        for name, each in row.quantities.items():
            retained = row.retained if name == summary.loss else None
            numbers = [*_numbers(each, retained), *(each.values.get(seed) for seed in seeds)]
            shown = ["" if value is None or not isfinite(value) else value for value in numbers]
            writer.writerow([row.label, row.recipe, name, *shown])
    return target.getvalue()


def _numbers(quantity: Quantity, retained: ConfidenceInterval | None) -> Iterator[float | None]:
    for each in (quantity.mean, quantity.difference, retained):
        yield from (None, None, None) if each is None else (each.value, each.low, each.high)


def _show(
    summary: StudySummary, header: Sequence[str], lines: Sequence[Sequence[str]], seeds: int, console: Any
) -> None:
    print_table(header, lines, console)
    notes = [f"±: 95 % interval over {seeds} seeds" if seeds > 1 else "For intervals, add --seeds 3"]
    if "difference" in header:
        notes.append(f"difference: {summary.loss} minus that of {summary.rows[0].label}, paired by seed")
    if "retained" in header:
        notes.append("retained: share of the gain of Dense() over Silent()")
    notes.append("sent: by a worker in the whole run")
    console.print("\n" + "; ".join(notes), markup=False)
    if summary.loss is None:
        console.print(NO_LOSS, markup=False)
    if summary.ignores_seed:
        console.print(f"All seeds gave the same values, so the script ignores the argument with {SEED}.", markup=False)
    if len(summary.metrics) > MOST_METRICS:
        console.print(f"{len(summary.metrics) - MOST_METRICS} more metrics: in --csv and --plot", markup=False)


def _write(
    summary: StudySummary,
    header: Sequence[str],
    lines: Sequence[Sequence[str]],
    finished: Mapping[StudyRun, Record],
    csv_file: Path | None,
    tex_file: Path | None,
    plot_file: Path | None,
) -> None:
    if csv_file:
        csv_file.write_text(csv_text(summary), encoding="utf-8")
    if tex_file:
        tex_file.write_text(latex_text(header, lines), encoding="utf-8")
    if plot_file:
        arms: dict[str, list[Record]] = {}
        for run, record in finished.items():
            arms.setdefault(run.label, []).append({**record, "recipe": run.label})
        rows = [*arms.values()]
        plot_metrics([row[0] for row in rows], plot_file, summary.metrics, [row[1:] for row in rows])
