"""Study: trains every recipe with every seed, stores each finished run, and estimates each quantity over the seeds."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite
from pathlib import Path
from statistics import fmean
from typing import Protocol

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.algorithms.recipes.retained_benefit import shares_of_benefit
from gossamer.base import bounded_file, system
from gossamer.base.intervals import ConfidenceInterval, sample_mean
from gossamer.base.units import seconds_text
from gossamer.errors import GossamerError
from gossamer.observe.comparison import is_loss, last_share, loss_at, loss_metric, seconds_to
from gossamer.observe.record import MOST_RECORD_BYTES, Record, write
from gossamer.observe.target import Target
from gossamer.plan.simulate.job import free_bytes
from gossamer.version import __version__

FREE_SHARE = 0.9  # of the free memory that runs may fill together
POLL_SECONDS = 1.0  # between updates of the progress line
WALL = "wall_seconds"  # field of a stored record: seconds that its run took on this machine
PROGRESS_PREFIX = "gossamer: "  # of the lines that a command prints about its progress

# -- runs and their store ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One training: a recipe with a seed. `command`, `environment` and `files` determine its result, and so does the
    script.

    label: name of the recipe, as the user wrote it. command: arguments of `gossamer`. files: read by the command.
    """

    label: str
    recipe: str
    seed: int
    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    files: tuple[Path, ...] = ()


class RunFailure(GossamerError):
    """A run that ended without a record, with the reason."""


class RunStore:
    """Finished runs in a folder, one JSON file each. The file name has a hash of all inputs of the run: this version of
    Gossamer, the script's text, the command, the environment and the files. A change of any of them means another
    run."""

    def __init__(self, folder: Path, script: Path) -> None:
        self.folder, self._script = folder, hashlib.sha256(script.read_bytes()).hexdigest()

    def file(self, name: str, *inputs: object) -> Path:
        """The file of a result with this name and these inputs."""
        text = json.dumps([__version__, self._script, *inputs])
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")[:60]
        return self.folder / f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"

    def load(self, run: StudyRun) -> Record | None:
        """The record of a finished run; None if it is missing."""
        return read_record(self._file(run))

    def save(self, run: StudyRun, record: Record) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        about = {"label": run.label, "recipe": run.recipe, "seed": run.seed, "command": ["gossamer", *run.command]}
        write(self._file(run), {"study": about, **record})

    def _file(self, run: StudyRun) -> Path:
        digests = (hashlib.sha256(file.read_bytes()).hexdigest() for file in run.files)
        return self.file(f"{run.recipe} seed {run.seed}", run.command, run.environment, *digests)


def read_record(file: Path) -> Record | None:
    """The JSON object in a file of the store. None if it is missing or damaged, so that it is made again."""
    try:
        found = json.loads(bounded_file.read_text(file, MOST_RECORD_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


# -- training ----------------------------------------------------------------------------------------------------------


class RunTrainer(Protocol):
    """Runs trainings, several at once from different threads."""

    processes: int  # of one run, for its memory

    def train(self, run: StudyRun, on_line: Callable[[str], None]) -> Record:
        """Train. `on_line` receives lines of progress. Raises RunFailure."""

    def stop(self) -> None:
        """End all runs in progress."""


@dataclass
class _Progress:
    """Finished runs, runs in progress, and the expected time."""

    total: int
    walls: list[float] = field(default_factory=list)  # seconds of finished runs
    finished: int = 0
    began: dict[StudyRun, float] = field(default_factory=dict)
    latest: dict[StudyRun, str] = field(default_factory=dict)

    def take(self, run: StudyRun, line: str) -> None:
        """Process one printed line of a run. Lines of the script and of tables are no progress."""
        if line.startswith(PROGRESS_PREFIX):
            self.latest[run] = line.removeprefix(PROGRESS_PREFIX).removeprefix(f"{run.recipe}: ")

    def line(self, left: int, at_once: int) -> str:
        shown = f"{self.finished} of {self.total} runs finished"
        if self.walls:
            usual, now = fmean(self.walls), time.monotonic()
            ahead = left + sum(max(0.0, 1 - (now - began) / usual) for began in self.began.values())
            shown += f", {at_once} at once, ready in about {seconds_text(usual * ahead / at_once)}"
        run = next(iter(self.began), None)
        return shown if run is None else f"{shown}; {run.label} seed {run.seed}: {self.latest.get(run, 'starting')}"


def jobs_that_fit(record: Record, processes: int, most: int) -> int:
    """The number of runs at once for which this machine has cores and memory, at least 1 and at most `most`.

    record: of a finished run, with its measured peak memory. processes: of one run.
    """
    cores = system.cores()
    peak = processes * (record.get("memory_bytes") or {}).get("peak_resident", 0)
    room = int(FREE_SHARE * free_bytes() / peak) if peak and isfinite(free_bytes()) else most
    return max(1, min(cores // min(cores, processes), room, most))


def train_missing(
    runs: Sequence[StudyRun], store: RunStore, trainer: RunTrainer, *, jobs: int | None, show: Callable[[str], None]
) -> tuple[dict[StudyRun, Record], dict[StudyRun, str]]:
    """Train the runs that the store lacks, and store each as soon as it is finished.

    Args:
        jobs: runs at once. None: one, until a run is finished whose memory is known; then as many as fit.
        show: receives the line of progress.

    Returns:
        The records of all finished runs, and the reasons of failed ones.
    """
    records = {run: record for run in runs if (record := store.load(run)) is not None}
    left = [run for run in runs if run not in records]
    failures: dict[StudyRun, str] = {}
    progress = _Progress(len(runs), [record[WALL] for record in records.values() if WALL in record], len(records))

    def train(run: StudyRun) -> Record:
        began = time.monotonic()
        record = trainer.train(run, partial(progress.take, run))
        return {**record, WALL: time.monotonic() - began}

    fitting = jobs
    working: dict[Future[Record], StudyRun] = {}
    with ThreadPoolExecutor(max_workers=len(left) or 1) as pool:
        try:
            while left or working:
                if fitting is None and records and not working:
                    fitting = jobs_that_fit(next(iter(records.values())), trainer.processes, len(left))
                while left and len(working) < (fitting or 1):
                    run = left.pop(0)
                    progress.began[run] = time.monotonic()
                    working[pool.submit(train, run)] = run
                for future in wait(working, POLL_SECONDS, FIRST_COMPLETED).done:
                    run = working.pop(future)
                    del progress.began[run]
                    try:
                        records[run] = future.result()
                    except RunFailure as failure:
                        failures[run] = str(failure)
                    else:
                        store.save(run, records[run])
                        progress.walls.append(records[run][WALL])
                    progress.finished += 1
                show(progress.line(len(left), fitting or 1))
        except BaseException:
            trainer.stop()
            raise
    return records, failures


# -- estimates over seeds ----------------------------------------------------------------------------------------------

SECONDS, BYTES, STEPS = "seconds", "bytes_sent", "steps"  # names of quantities that are no metric of the script
LOGGED = "logged"  # before the name of a metric that is also one of these


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One quantity of one recipe.

    values: by seed, infinite if that training diverged. mean: with its 95 % interval over the seeds; unbounded with one
    seed. difference: paired by seed, to the first recipe; None in the first recipe.
    """

    values: Mapping[int, float]
    mean: ConfidenceInterval
    difference: ConfidenceInterval | None


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    """One recipe. quantities: by name, metrics by `metric_quantity`. retained: the retained benefit of the loss; None
    without Silent() and Dense() among the recipes."""

    label: str
    recipe: str
    quantities: Mapping[str, Quantity]
    retained: ConfidenceInterval | None


@dataclass(frozen=True, kw_only=True)
class StudySummary:
    """All recipes. loss: the metric of the retained benefit; None if the script logs none. metrics: all metrics, the
    loss first. equal_steps: at which metrics are compared, the fewest of all runs that did not diverge."""

    rows: tuple[StudyRow, ...]
    loss: str | None
    metrics: tuple[str, ...]
    equal_steps: int
    target: Target | None

    @property
    def ignores_seed(self) -> bool:
        """Whether all seeds of each recipe gave bitwise the same metrics."""
        names = {metric_quantity(name) for name in self.metrics}
        several = [each for row in self.rows for name, each in row.quantities.items() if name in names]
        return any(len(each.values) > 1 for each in several) and all(len(set(e.values.values())) == 1 for e in several)


def summarize(runs: Mapping[StudyRun, Record], workers: int, target: Target | None = None) -> StudySummary:
    """Estimate each metric that all runs logged, the bytes that a worker sent, and the seconds of each run.

    Args:
        runs: finished runs, ordered by recipe; differences are to the first recipe.
        target: adds the quantity str(target): seconds until it is reached, infinite if a run did not reach it.
    """
    arms: dict[str, dict[StudyRun, Record]] = {}
    for run, record in runs.items():
        arms.setdefault(run.label, {})[run] = record
    records = [*runs.values()]
    sound = [record for record in records if not diverged(record)] or records
    steps = min(record["steps"] for record in sound)
    logged = [name for name in sound[0]["metrics"] if all(_has(record, name, steps) for record in sound)]
    loss = next((name for name in [loss_metric(sound, inf, steps)] if name in logged), None)
    metrics = tuple(dict.fromkeys([*([loss] if loss else []), *logged]))
    shares = {name: last_share(sound, name, [(0, steps)]) for name in metrics}

    def values(record: Record) -> dict[str, float]:
        ends = {n: inf if diverged(record) else loss_at(record, n, steps, shares[n]) for n in metrics}
        found = {metric_quantity(name): end for name, end in ends.items()}
        found |= {
            BYTES: record["steps"] * record["bytes_sent_per_step"]["accounted"],
            SECONDS: record["seconds"],
            STEPS: float(record["steps"]),
        }
        reached = seconds_to(record, target)
        return found if target is None else found | {str(target): inf if reached is None else reached}

    by_seed = {label: {run.seed: values(record) for run, record in arm.items()} for label, arm in arms.items()}
    first = by_seed[next(iter(arms))]
    recipes = [next(iter(arm)).recipe for arm in arms.values()]
    losses = [
        {seed: each[metric_quantity(loss)] for seed, each in arm.items()} if loss else {} for arm in by_seed.values()
    ]
    retained = shares_of_benefit([resolve(each, workers) for each in recipes], losses)
    rows = (
        StudyRow(
            label=label,
            recipe=recipe,
            quantities={name: _quantity(name, arm, None if arm is first else first) for name in values(records[0])},
            retained=share,
        )
        for (label, arm), recipe, share in zip(by_seed.items(), recipes, retained, strict=True)
    )
    return StudySummary(rows=tuple(rows), loss=loss, metrics=metrics, equal_steps=steps, target=target)


def metric_quantity(name: str) -> str:
    """The name of a metric among the quantities of a row: that of a metric named "seconds" is "logged seconds"."""
    return f"{LOGGED} {name}" if name.removeprefix(f"{LOGGED} ") in (SECONDS, BYTES, STEPS) else name


def diverged(record: Record) -> bool:
    """Whether the last value of a loss is not finite. A simulation ends there, with a mark in its record."""
    ends = [points[-1][2] for name, points in record["metrics"].items() if is_loss(name) and points]
    return bool(record.get("diverged")) or any(end is None or not isfinite(end) for end in ends)


def _has(record: Record, name: str, steps: int) -> bool:
    points = record["metrics"].get(name, ())
    return bool(points) and points[0][0] <= steps


def _quantity(
    name: str, arm: Mapping[int, Mapping[str, float]], first: Mapping[int, Mapping[str, float]] | None
) -> Quantity:
    values = {seed: each[name] for seed, each in arm.items()}
    shared = [seed for seed in arm if first is not None and seed in first]
    apart = [values[seed] - first[seed][name] for seed in shared if first is not None]
    return Quantity(values=values, mean=interval([*values.values()]), difference=interval(apart) if apart else None)


def interval(values: Sequence[float]) -> ConfidenceInterval:
    """The mean and its 95 % interval by Student's t, for independent values. Infinite if one value is not finite."""
    if not all(map(isfinite, values)):
        return ConfidenceInterval(value=inf, low=-inf, high=inf)
    return sample_mean(values).interval()
