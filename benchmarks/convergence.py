"""Convergence: what every compressor costs in loss, beside Dense() after as many steps, and for as many bytes.

Four workers are simulated in one process, with real aggregations. The yardstick is how much Dense() differs from seed
to seed. Every biased compressor has a twin that forgets what it lost (feedback=False).

    python benchmarks/convergence.py [--study NAME] [--tasks NAME ...] [--compressors TEXT ...] [--page FILE]

--study adamw asks what closes the gap of TopK under AdamW, --study base what two recipes cost a larger model.

What was trained is kept in --json, and not trained again when the same is asked for once more, unless its recipe means
something else by now. --verify trains --tasks and --compressors into a file of its own, and compares them with their
rows on the page.
"""

import argparse
import logging
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.closing import closing_part  # found only after the line above
from benchmarks.kept import read, verify_rows, write
from benchmarks.markdown_tables import named_rows
from benchmarks.page import PAGE, around, between, put_between
from benchmarks.picture import plot
from benchmarks.provenance import QUICK, provenance, scratch
from benchmarks.report import page_part, sentences
from benchmarks.side_by_side import done, one_thread
from benchmarks.studies import DENSE, EVERY, STUDIES
from benchmarks.training import POINTS, Run, train

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.units import seconds_text
from gossamer.plan.bench import machine

PICTURED = "training loss of every compressor, and of Dense() for the same bytes, a panel for each task"
PARTS = {"loss": page_part, "adamw": closing_part, "base": page_part}


class Job(NamedTuple):
    task: str
    compressor: str
    seed: int
    steps: int
    workers: int


def jobs(args: argparse.Namespace) -> list[Job]:
    """Seed by seed, so that a part of them tells something already."""
    found: list[Job] = []
    for name, text in STUDIES[args.study].pairs(args.tasks, args.compressors):
        task = EVERY[name]
        usual = task.dense_seeds if text == DENSE else task.seeds
        found += [Job(name, text, seed, args.steps or task.steps, args.workers) for seed in range(args.seeds or usual)]
    return sorted(found, key=lambda job: job.seed)


def key(run: Run) -> Job:
    return Job(run["task"], run["compressor"], run["seed"], run["steps"], run["workers"])


def is_current(run: Run) -> bool:
    """Whether the recipe of a kept run still resolves to what was trained."""
    return run["resolved"] == repr(resolve(run["compressor"], world=run["workers"]).compressor)


def do(job: Job) -> Run:
    every = 1 if job.compressor == DENSE else max(1, job.steps // POINTS)
    return train(job.task, EVERY[job.task], job.compressor, job.seed, job.steps, job.workers, every)


def prepare() -> None:
    """One thread, and no notice about momentum at the start of every training."""
    one_thread()
    logging.getLogger("gossamer").setLevel(logging.ERROR)


def train_all(wanted: Sequence[Job], record: dict[str, Any], args: argparse.Namespace) -> list[Run]:
    """All wanted runs, kept ones and new ones; the file is written after every run."""
    kept: list[Run] = [] if args.fresh else [run for run in read(args.json) if is_current(run)]
    runs = {key(run): run for run in kept}
    missing = [job for job in wanted if job not in runs]
    began = time.monotonic()
    for number, run in enumerate(done(do, missing, args.processes, prepare), start=1):
        runs[key(run)] = run
        write(args.json, {**record, "runs": list(runs.values())})
        left = (time.monotonic() - began) / number * (len(missing) - number)
        shown = f"{number} of {len(missing)}: {run['task']}, {run['compressor']}, seed {run['seed']}"
        print(f"{shown}, {run['seconds']:.1f} s; {seconds_text(left)} left", file=sys.stderr, flush=True)
    return [runs[job] for job in wanted]


def quick(args: argparse.Namespace) -> None:
    """A few steps of two compressors on the study's first task, in files of their own."""
    args.tasks, args.steps, args.seeds = args.tasks or list(STUDIES[args.study].tasks)[:1], 12, 2
    args.compressors, args.page = args.compressors or ["TopK(density=0.01)"], scratch(PAGE)
    args.json = QUICK / args.json.name


def main(args: argparse.Namespace) -> None:
    if args.redraw:
        plot(between(args.redraw, args.study), args.redraw.with_suffix(".png"))
        return
    if args.quick:
        quick(args)
    if args.verify:
        args.page, args.json, args.fresh = args.page or PAGE, QUICK / f"verified-{args.json.name}", True
    if args.page:
        around(args.page, args.study)  # the end of the work would be too late to find that it has no place
    record = {"machine": machine(), "command": shlex.join(["python", *sys.argv])}
    runs = train_all(jobs(args), record, args)
    found = PARTS[args.study](runs, [provenance()])
    if args.verify:
        verify_rows(args.page, args.study, named_rows(found))
        return
    print(found)
    for sentence in sentences(runs):
        print(sentence, file=sys.stderr)
    if args.page:
        pictured = STUDIES[args.study].pictured
        put_between(args.page, args.study, found + f"\n\n![{PICTURED}]({args.page.stem}.png)" * pictured)
        if pictured:
            plot(found, args.page.with_suffix(".png"))


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What every compressor costs in loss.")
    parser.add_argument("--study", choices=STUDIES, default="loss", help="loss: every compressor; or a closer question")
    parser.add_argument(
        "--tasks", nargs="+", choices=EVERY, default=[], metavar="NAME", help="of the study; default: all"
    )
    parser.add_argument(
        "--compressors", nargs="+", default=[], metavar="TEXT", help="instead of all; Dense() and twins are added"
    )
    parser.add_argument("--seeds", type=int, help="how many; default: as the task has it, 2 to 5, of Dense() more")
    parser.add_argument("--steps", type=int, help="default: as the task has it")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="trainings at once")
    parser.add_argument("--json", type=Path, default=Path("runs/convergence.json"), metavar="FILE")
    parser.add_argument("--fresh", action="store_true", help="train everything again")
    parser.add_argument("--verify", action="store_true", help="compare with the rows of --page, and note it there")
    parser.add_argument("--quick", action="store_true", help="a few steps, in files of their own")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table there, and the picture beside it")
    parser.add_argument("--redraw", type=Path, metavar="PAGE", help="draw its picture from its tables, and no more")
    return parser


if __name__ == "__main__":
    main(options().parse_args())
