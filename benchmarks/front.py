"""Which recipe? Held-out loss against bytes, of strategies and compressors under AdamW, SGD and Muon.

Four workers in one process: a thread, a model, an optimizer and a real session each. Learning rates are tuned first,
for Dense() and for each family's representative, with seeds of their own; then everything is trained with the rate of
its family, seed by seed, the whole study with the first seed before any other. Writes docs/benchmarks/front.md.

    python benchmarks/front.py --processes 2 --minutes 120      # as far as it comes; the same again goes on from there
    python benchmarks/front.py --phase report                   # writes the page from what was trained
    python benchmarks/front.py --tasks bytelm --families local few-bits --seeds 1
    python benchmarks/front.py --quick                          # a few steps, in files of their own

--phase tune|run|report: one of the three instead of all. What was trained is kept in --json after every run, and not
trained again unless its recipe or its task means something else by now. A family is trained when its learning rate is
known. Recipes: benchmarks/front_families.py. Tasks: benchmarks/front_tasks.py.
"""

import argparse
import os
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.front_families import FAMILIES  # found only after the line above
from benchmarks.front_picture import plot
from benchmarks.front_plan import WORKERS, Job, Plan, TaskRun, is_current, key, plan
from benchmarks.front_report import Front, fronts, page_part
from benchmarks.front_tasks import SETTINGS
from benchmarks.kept import read, write
from benchmarks.page import around, put_between
from benchmarks.provenance import QUICK, ROOT, provenance, scratch
from benchmarks.side_by_side import done
from benchmarks.virtual_workers import train

from gossamer.base.units import seconds_text
from gossamer.comm.environment.host_info import machine

PAGE = ROOT / "docs" / "benchmarks" / "front.md"
TUNE, RUN, REPORT = "tune", "run", "report"
FAMILY_OF_QUICK = ["few-bits", "local-few-bits"]
Outcome = TaskRun | str | None  # a run, or why there is none; None where time was up


def do(job: Job, until: float) -> tuple[Job, Outcome]:
    """until: by time.time(), which all processes share."""
    if time.time() >= until:
        return job, None
    setting, began = SETTINGS[job.task], time.process_time()
    try:
        run = train(setting.task, setting.exam(), job.recipe, job.learning_rate, job.seed, job.steps, WORKERS)
    except Exception as problem:  # one recipe that an optimizer cannot serve does not end a night's study
        return job, f"{type(problem).__name__}: {problem}"
    used = time.process_time() - began
    return job, {**run, "task": job.task, "about": setting.about, "cpu_seconds": used}


class Study:
    """Runs that are kept, and what is missing of those that are wanted."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.path: Path = args.json
        self.processes: int = args.processes
        self.until: float = time.time() + 60 * args.minutes
        kept: list[TaskRun] = [] if args.fresh else read(self.path)
        self.runs: dict[Job, TaskRun] = {key(run): run for run in kept if is_current(run)}
        self.refused: dict[Job, str] = {}
        self.plans = [plan(task, args.families, args.steps) for task in args.tasks]
        self.seeds: int = args.seeds

    @property
    def time_is_up(self) -> bool:
        return time.time() >= self.until

    def tune(self) -> None:
        while not self.time_is_up:
            wanted = [job for each in self.plans for job in each.tuning(self.runs) if job not in self.refused]
            if not wanted:
                break
            self.train(sorted(wanted, key=lambda job: job.seed), TUNE)

    def run(self) -> None:
        wanted = [job for each in self.plans for job in each.shown(self.runs, self.seeds)]
        self.train(sorted(wanted, key=lambda job: job.seed), RUN)

    def train(self, wanted: Sequence[Job], phase: str) -> None:
        missing = [job for job in wanted if job not in self.runs and job not in self.refused]
        for number, (job, outcome) in enumerate(done(partial(do, until=self.until), missing, self.processes), start=1):
            if outcome is None:
                continue
            shown = f"{phase} {number} of {len(missing)}: {job.task}, {job.recipe}, lr {job.learning_rate:g}"
            if isinstance(outcome, str):
                self.refused[job] = outcome
                print(f"{shown}: left out, {outcome}", file=sys.stderr, flush=True)
                continue
            self.runs[job] = outcome
            write(self.path, self.record())
            left = seconds_text(self.seconds(missing[number:]) / self.processes)
            about = f"seed {job.seed}, held-out loss {outcome['held_out']}, {outcome['seconds']:.0f} s"
            print(f"{shown}, {about}; {left} left", file=sys.stderr, flush=True)

    def record(self) -> dict[str, Any]:
        return {"machine": machine(), "command": shlex.join(["python", *sys.argv]), "runs": list(self.runs.values())}

    def seconds(self, jobs: Sequence[Job]) -> float:
        """What these take in one process, by what others of their task took."""
        took: dict[str, list[float]] = defaultdict(list)
        for run in self.runs.values():
            took[run["task"]].append(run["seconds"] / run["steps"])
        usual = statistics.fmean(each for many in took.values() for each in many)
        return sum(job.steps * statistics.fmean(took.get(job.task, [usual])) for job in jobs)

    def fronts(self) -> list[Front]:
        return fronts(self.plans, self.runs, self.seeds)


def say_what_is_left_out(plans: Sequence[Plan]) -> None:
    for text in dict.fromkeys(text for each in plans for text in each.unreadable()):
        print(f"left out, since this version cannot read it: {text}", file=sys.stderr)


def report(study: Study, args: argparse.Namespace) -> None:
    found = study.fronts()
    if not found:
        sys.exit(f"{args.json} has no runs of Dense() with a tuned learning rate yet. Run --phase tune, then run.")
    command = ["python", *(each for each in sys.argv if each != "--fresh")]
    text = page_part(found, [provenance(command)])
    print(text)
    if args.page:
        plot(found[0], args.page.with_suffix(".png"))
        alt = f"gap to Dense() over how many times fewer bytes, a panel for each family; task {found[0].plan.task}"
        put_between(args.page, "front", f"![{alt}]({args.page.stem}.png)\n\n{text}")


def quick(args: argparse.Namespace) -> None:
    """A few steps of two families on the smallest task, in files of their own; the numbers mean nothing."""
    args.tasks, args.families, args.steps, args.seeds = ["digits-conv"], FAMILY_OF_QUICK, 20, 2
    args.json, args.page = QUICK / args.json.name, scratch(PAGE)


def main(args: argparse.Namespace) -> None:
    if args.quick:
        quick(args)
    if args.page and REPORT in args.phase:
        around(args.page, "front")  # the end of the work would be too late to find that it has no place
    study = Study(args)
    say_what_is_left_out(study.plans)
    if TUNE in args.phase:
        study.tune()
    if RUN in args.phase:
        study.run()
    if REPORT in args.phase:
        report(study, args)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"tasks: {', '.join(SETTINGS)}",
    )
    parser.add_argument("--phase", nargs="+", choices=(TUNE, RUN, REPORT), default=[TUNE, RUN, REPORT])
    parser.add_argument("--tasks", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=5, help="how many are shown, from 0 on")
    parser.add_argument("--steps", type=int, help="of every training; default: as the task has it")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="trainings at once, of four threads")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no training begins")
    parser.add_argument("--json", type=Path, default=Path("runs/front.json"), metavar="FILE")
    parser.add_argument("--fresh", action="store_true", help="train everything again")
    parser.add_argument("--quick", action="store_true", help="a few steps, in files of their own")
    page = parser.add_mutually_exclusive_group()
    page.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="with the markers that it is put between")
    page.add_argument("--no-page", dest="page", action="store_const", const=None, help="only print the report")
    return parser


if __name__ == "__main__":
    main(options().parse_args())
