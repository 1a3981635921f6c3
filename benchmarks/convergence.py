"""What every compressor costs in loss: beside Dense() after as many steps, and for as many bytes.

Four workers are simulated in one process, with real aggregations. The yardstick is how much Dense() differs from seed
to seed. Every biased compressor has a twin that forgets what it lost (feedback=False).

    python benchmarks/convergence.py [--tasks NAME ...] [--compressors TEXT ...] [--seeds N] [--steps N] [--page FILE]

What was trained is kept in --json, and not trained again when the same is asked for once more.
"""

import argparse
import json
import logging
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.page import around, put_between  # found only after the line above
from benchmarks.report import DENSE, page_part, plot, sentences
from benchmarks.tasks import TASKS
from benchmarks.training import POINTS, Run, train

from gossamer.bench import machine, roster
from gossamer.compressors import Compressor
from gossamer.observe.units import seconds_text
from gossamer.recipe import parse
from gossamer.terms import Term

COMPRESSORS = {
    "Dense": [DENSE, "Dense(dtype='bfloat16')"],
    "TwoBit": ["TwoBit(adaptive=True)"],
    "TopK": ["TopK(density=0.01)"],
    "RandomK": ["RandomK(density=0.01)"],
    "Threshold": ["Threshold(value=0.01, capacity=0.02)"],
    "DGC": ["DGC(density=0.01, warmup=20)"],
    "Chain": ["Chain(TopK(density=0.01), Int8())"],
    "Warmup": ["Warmup(TopK(density=0.01), steps=10)"],
    "OneBitAdam": ["OneBitAdam(warmup=60)"],
    "Feedback": [],
    "Route": [],
    "Sharded": [],  # resolving finds it where it pays
}


class Job(NamedTuple):
    task: str
    compressor: str
    seed: int
    steps: int
    workers: int


def without_feedback(text: str) -> str | None:
    """The twin that forgets, where the compressor would be wrapped in Feedback."""
    (term,) = parse(text).terms
    return repr(_forgetful(term)) if isinstance(term, Compressor) and term.wants_feedback else None


def _forgetful(term: Term) -> Term:
    inner = {item.name: getattr(term, item.name) for item in fields(term)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {name: _forgetful(value) for name, value in inner.items() if isinstance(value, Term)}
    if "feedback" in inner:
        changes["feedback"] = False
    return replace(term, **changes)  # type: ignore[type-var]


def jobs(args: argparse.Namespace) -> Iterator[Job]:
    """Dense() first: everything is held against it."""
    for name in args.tasks:
        task = TASKS[name]
        chosen = [text for text in args.compressors or roster(COMPRESSORS) if text.partition("(")[0] != task.without]
        texts = dict.fromkeys([DENSE, *chosen, *filter(None, map(without_feedback, chosen))])
        for text in texts:
            for seed in range(args.seeds or task.seeds):
                yield Job(name, text, seed, args.steps or task.steps, args.workers)


def key(run: Run) -> Job:
    return Job(run["task"], run["compressor"], run["seed"], run["steps"], run["workers"])


def do(job: Job) -> Run:
    every = 1 if job.compressor == DENSE else max(1, job.steps // POINTS)
    return train(job.task, TASKS[job.task], job.compressor, job.seed, job.steps, job.workers, every)


def do_all(wanted: Sequence[Job], processes: int) -> Iterator[Run]:
    """As they are done; each process has one thread."""
    if processes == 1:
        prepare()
        yield from map(do, wanted)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=prepare) as pool:
        for done in as_completed([pool.submit(do, job) for job in wanted]):
            yield done.result()


def prepare() -> None:
    """One thread, and no notice about momentum at the start of every training."""
    torch.set_num_threads(1)
    logging.getLogger("gossamer").setLevel(logging.ERROR)


def read(path: Path) -> list[Run]:
    return json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record) + "\n", encoding="utf-8")
    part.replace(path)


def train_all(wanted: Sequence[Job], record: dict[str, Any], args: argparse.Namespace) -> list[Run]:
    """What was asked for, of earlier times and now; the file is written after every run."""
    kept: list[Run] = [] if args.fresh else read(args.json)
    runs = {key(run): run for run in kept}
    missing = [job for job in wanted if job not in runs]
    began = time.monotonic()
    for number, run in enumerate(do_all(missing, args.processes), start=1):
        runs[key(run)] = run
        write(args.json, {**record, "runs": list(runs.values())})
        left = (time.monotonic() - began) / number * (len(missing) - number)
        shown = f"{number} of {len(missing)}: {run['task']}, {run['compressor']}, seed {run['seed']}"
        print(f"{shown}, {run['seconds']:.1f} s; {seconds_text(left)} left", file=sys.stderr, flush=True)
    return [runs[job] for job in wanted]


def main(args: argparse.Namespace) -> None:
    if args.page:
        around(args.page, "loss")  # the end of the work would be too late to find that it has no place
    record = {"machine": machine(), "command": shlex.join(["python", *sys.argv])}
    runs = train_all(list(jobs(args)), record, args)
    twins = {text: without_feedback(text) for text in dict.fromkeys(run["compressor"] for run in runs)}
    about = [f"Command: `{record['command']}`", ", ".join(f"{name} {value}" for name, value in machine().items())]
    found = page_part(runs, {text: twin for text, twin in twins.items() if twin}, about)
    print(found)
    for sentence in sentences(runs):
        print(sentence, file=sys.stderr)
    if args.page:
        plot(runs, args.page.with_suffix(".png"))
        put_between(args.page, "loss", f"{found}\n\n![training loss over bytes sent]({args.page.stem}.png)")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What every compressor costs in loss.")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--compressors", nargs="+", metavar="TEXT", help="instead of all; Dense() and twins are added")
    parser.add_argument("--seeds", type=int, help="how many; default: as the task has it, 3 or 5")
    parser.add_argument("--steps", type=int, help="default: as the task has it")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="trainings at once")
    parser.add_argument("--json", type=Path, default=Path("runs/convergence.json"), metavar="FILE")
    parser.add_argument("--fresh", action="store_true", help="train everything again")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table there, and a picture beside it")
    return parser


if __name__ == "__main__":
    main(options().parse_args())
