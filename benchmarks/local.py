"""Local steps: strategies that synchronize less often, beside synchronous training.

Four workers in one process train examples/bytelm.py: a thread, a model, an optimizer and a real session each. What
counts is the held-out loss of what they agree on, and the bytes they sent.

    python benchmarks/local.py [--recipes TEXT ...] [--seeds 0 1 ...] [--steps N] [--page FILE] [--report | --quick]

What was trained is kept in --results, one line a run, and not trained again. --report trains nothing. --verify trains
--recipes into a file of its own, and compares their losses with those of the page.
"""

import argparse
import json
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch import Tensor
from torch.optim import AdamW

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks import kept  # found only after the line above
from benchmarks.local_picture import plot
from benchmarks.local_report import DENSE, LEARNING_RATE, page_part, study
from benchmarks.page import around, between, put_between
from benchmarks.provenance import QUICK as SCRATCH
from benchmarks.provenance import ROOT, provenance, scratch
from benchmarks.side_by_side import done
from benchmarks.tasks import TASKS
from benchmarks.virtual_workers import APART, Run, train
from examples.bytelm import windows

from gossamer.base.units import bytes_text, seconds_text

WORKERS, STEPS, SEEDS = 4, 1000, (0, 1, 2, 3, 4)
EXAM = 256  # windows that are held out and looked at: as many as the example's

PICTURED = "held-out loss of every recipe, a panel for each learning rate, and the bytes that a worker sent"
OUTER = "DiLoCo(period={}, outer_learning_rate=1.0, outer_momentum=0.5)"  # for tens of periods, not hundreds
TWO_BITS = "Chain(TopK(density=0.05), SignMagnitude())"
ONE_BIT = "Route(Feedback(Sharded(OneBit())), rest=Feedback(Sharded(Float4())))"
AS_IT_IS = [
    DENSE,
    APART,
    "LocalSGD(period=4)",
    "DelayedAveraging(delay=4)",
    "DiLoCo(period=20)",
    *(f"DiLoCo(period=20) + {compressor}" for compressor in ("Int8()", "Float4()")),
    f"DiLoCo(period=20, outer_learning_rate=1.0, outer_momentum=0.0) + {TWO_BITS}",
    OUTER.format(20),
]
FASTER = [
    DENSE,
    APART,
    "Float4()",
    OUTER.format(20),
    *(f"{OUTER.format(period)} + {ONE_BIT}" for period in (20, 50, 100)),
]
FASTER_RATE = 6e-3
STUDY = [*((recipe, LEARNING_RATE) for recipe in AS_IT_IS), *((recipe, FASTER_RATE) for recipe in FASTER)]
QUICK = [DENSE, APART, "DiLoCo(period=4) + Float4()"]
TASK = replace(TASKS["bytelm"], optimizer=lambda parameters: AdamW(parameters))


class Job(NamedTuple):
    recipe: str
    learning_rate: float
    seed: int
    steps: int
    workers: int


def key(run: Run) -> Job:
    return Job(run["recipe"], run["learning_rate"], run["seed"], run["steps"], run["workers"])


@cache
def exam() -> tuple[Tensor, ...]:
    """Every tenth file of the text is not learned from."""
    held_out = windows(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[::10])
    return (held_out[:: len(held_out) // EXAM],)


def do(job: Job) -> Run:
    return train(TASK, exam(), job.recipe, job.learning_rate, job.seed, job.steps, job.workers)


def read(path: Path) -> list[Run]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def train_all(wanted: Sequence[Job], results: Path, processes: int) -> None:
    """Train what the file of results lacks; every run is a line there as soon as it is done."""
    known = {key(run) for run in read(results)}
    missing = [job for job in wanted if job not in known]
    results.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    for number, run in enumerate(done(do, missing, processes), start=1):
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")
        left = (time.monotonic() - began) / number * (len(missing) - number)
        shown = f"{number} of {len(missing)}: {run['recipe']}, seed {run['seed']}, held-out loss {run['held_out']}"
        print(f"{shown}, {run['seconds']:.0f} s; {seconds_text(left)} left", file=sys.stderr, flush=True)


def jobs(args: argparse.Namespace) -> list[Job]:
    """All recipes of one seed before the next seed: the table is whole early, and gets surer."""
    asked = [(recipe, args.learning_rate) for recipe in args.recipes] if args.recipes else STUDY
    chosen = dict.fromkeys([(DENSE, LEARNING_RATE), (APART, LEARNING_RATE), *asked])
    return [Job(recipe, rate, seed, args.steps, WORKERS) for seed in args.seeds for recipe, rate in chosen]


def verify(args: argparse.Namespace) -> None:
    """Train the rows of --recipes again, and compare their losses with those of the page."""
    results = SCRATCH / "verified-local.jsonl"
    results.unlink(missing_ok=True)
    wanted = [Job(text, args.learning_rate, seed, args.steps, WORKERS) for text in args.recipes for seed in args.seeds]
    train_all(wanted, results, args.processes)
    found = study(read(results))
    made = {
        f"`{name}`": {"held-out loss": str(found.losses(name)), "seeds": str(len(runs))}
        | {"sent per worker": bytes_text(found.bytes_sent(name))}
        for name, runs in found.runs.items()
    }
    kept.verify_rows(args.page, "local", made)


def quick(args: argparse.Namespace) -> None:
    """Everything once, in seconds; the numbers mean nothing."""
    args.steps, args.seeds, args.recipes = 8, [0, 1], QUICK
    args.page = scratch(ROOT / "docs" / "benchmarks" / "local.md")
    args.results = args.results.with_name(f"quick-{args.results.name}")


def main(args: argparse.Namespace) -> None:
    if args.redraw:
        plot(between(args.redraw, "local"), args.redraw.with_suffix(".png"))
        return
    if args.quick:
        quick(args)
    if args.verify:
        args.page = args.page or ROOT / "docs" / "benchmarks" / "local.md"
    if args.page:
        around(args.page, "local")  # the end of the work would be too late to find that it has no place
    if args.verify:
        verify(args)
        return
    wanted = jobs(args)
    if not args.report:
        train_all(wanted, args.results, args.processes)
    trained = {key(run): run for run in read(args.results)}  # of what was trained twice, the last
    found = study([trained[job] for job in wanted if job in trained])
    if missing := {DENSE, APART} - set(found.runs):
        sys.exit(f"{args.results} has no runs of {missing}, and others are held against them. Leave out --report.")
    text = page_part(found, [provenance(["python", *(op for op in sys.argv if op != "--report")])])
    print(text)
    if args.page:
        plot(text, args.page.with_suffix(".png"))
        put_between(args.page, "local", f"{text}\n\n![{PICTURED}]({args.page.stem}.png)")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Whether talking less is worth it.")
    parser.add_argument("--recipes", nargs="+", metavar="TEXT", help="instead of the study's")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help="of --recipes")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--processes", type=int, default=2, help="trainings at once, of a thread for each worker")
    parser.add_argument("--results", type=Path, default=Path("runs/local.jsonl"), metavar="FILE")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table there, and a picture beside it")
    parser.add_argument("--redraw", type=Path, metavar="PAGE", help="draw its picture from its table, and no more")
    parser.add_argument("--report", action="store_true", help="train nothing, write what is there")
    parser.add_argument("--verify", action="store_true", help="compare --recipes with their rows on --page")
    parser.add_argument("--quick", action="store_true", help="a few steps of a few recipes, in a file of their own")
    return parser


if __name__ == "__main__":
    main(options().parse_args())
