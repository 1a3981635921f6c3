"""Joining: how long the others stand still when a worker joins an elastic run, in seconds and in steps.

Workers of a run are killed one by one, and the launcher starts others in their places, which join: four a minute. A
stall is the step in which the number of workers grew over the median step before, at the others. Apart from it: the
rate while newcomers start, which takes processor time from who trains on the same machine.

    python benchmarks/joining.py [--joins 8] [--every 15] [--networks none 100mbit,20ms] [--size small] [--json FILE]
    python benchmarks/joining.py --quick        # two joins, a network, to see that it runs
"""

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.elastic_runs import DrivenRun, WorkerProcess, read, run, spread  # found only after the line above
from benchmarks.provenance import provenance
from benchmarks.report import markdown

WORKERS, LEAST = 4, 2
UNLIMITED = "none"
RECIPES = ["Dense()", "TopK(density=0.01)", "DiLoCo(period=20) + Int8()"]
TOLD = re.compile(r"joined after step \d+, in ([\d.]+) s")
BEFORE = 50  # steps, of which the median is the usual one


@dataclass(kw_only=True)
class Joins:
    """What the others noticed of workers that joined, on one network with one recipe."""

    recipe: str
    network: str
    killed: int = 0
    stalls: list[float] = field(default_factory=list)  # seconds beyond the median step: the longest of the others
    steps: list[float] = field(default_factory=list)  # the same, in median steps
    told: list[float] = field(default_factory=list)  # seconds from view to view, as the run says
    starting: list[float] = field(default_factory=list)  # seconds from a loss until its successor has joined
    missed: list[float] = field(default_factory=list)  # steps in that time fewer than at the median step
    error: str = ""


@dataclass(frozen=True)
class Joined:
    """A step after which there were more workers than before, as one of the others wrote it down."""

    view: int  # its number in the order of the run
    moment: float
    seconds: float  # of the step
    usual: float  # the median step before

    @property
    def stall(self) -> float:
        return self.seconds - self.usual


def joins_of(worker: WorkerProcess) -> Iterator[Joined]:
    """A newcomer counts from the first step that it makes with the others."""
    lengths = [late.moment - early.moment for early, late in pairwise(worker.steps)]
    for place, (early, late) in enumerate(pairwise(worker.steps)):
        if late.size > early.size:
            usual = statistics.median(lengths[max(0, place - BEFORE) : place] or lengths)
            # the step after may be the one that waits: what it waits for is written when it is over
            yield Joined(late.number, late.moment, max(lengths[place : place + 2]), usual)


def judge(found: Joins, processes: Sequence[WorkerProcess], killed: Sequence[float]) -> None:
    all_joins = [each for worker in processes for each in joins_of(worker)]
    for number in sorted({each.view for each in all_joins}):
        seen = [each for each in all_joins if each.view == number]
        longest = max(seen, key=lambda each: each.stall)
        found.stalls.append(longest.stall)
        found.steps.append(longest.stall / longest.usual)
        if earlier := [moment for moment in killed if moment < longest.moment]:
            begin = earlier[-1]
            found.starting.append(longest.moment - begin)
            made = max(sum(begin < step.moment <= longest.moment for step in worker.steps) for worker in processes)
            found.missed.append((longest.moment - begin) / longest.usual - made)


def disturb(running: DrivenRun, args: argparse.Namespace) -> list[float]:
    """Kill one worker after the other, each when all are there. Returns when."""
    killed = []
    running.wait_for(WORKERS, BEFORE)
    for number in range(args.joins):
        running.wait_for(WORKERS, 2)
        victim = running.training()[number % WORKERS]
        killed.append(running.kill(victim))
        running.sleep(args.every)
    running.wait_for(WORKERS, 2)
    running.sleep(2.0)
    return killed


def measure(recipe: str, network: str, args: argparse.Namespace) -> Joins:
    found = Joins(recipe=recipe, network=network)
    emulated = [] if network == UNLIMITED else ["--network", network]
    options = [*emulated, "--recipe", recipe, "--max-restarts", "1000"]
    keep = args.keep and args.keep / f"{RECIPES.index(recipe) if recipe in RECIPES else 'x'}-{network}"
    with run(f"{LEAST}:{WORKERS}", options, ["--size", args.size], keep) as running:
        try:
            begin = time.monotonic()
            killed = disturb(running, args)
            found.killed = len(killed)
            code = running.stop()
            found.error = f"ended with {code}: {running.text[-3000:]}" if code else ""
            found.told = [float(told[1]) for _, line in running.said if (told := TOLD.search(line))]
            judge(found, read(running.folder), killed)
            print(f"{recipe} on {network}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        except SystemExit as problem:  # what broke is a result
            found.error = str(problem)
    return found


def row(found: Joins) -> dict[str, str]:
    return {
        "": f"{found.recipe}, network: {found.network}",
        "joins": f"{len(found.stalls)} of {found.killed}",
        "stall, seconds": spread(found.stalls),
        "as the run says, seconds": spread(found.told),
        "stall, steps": spread(found.steps, 1),
        "from loss to join, seconds": spread(found.starting, 1),
        "steps missed in that time": spread(found.missed, 1),
        "broke": found.error.replace("\n", " ")[-200:],
    }


def main(args: argparse.Namespace) -> None:
    if args.quick:
        args.joins, args.recipes, args.networks = 2, RECIPES[1:2], ["100mbit,20ms"]
    found = []
    for network in args.networks:
        for recipe in args.recipes:
            found.append(measure(recipe, network, args))
            if args.json:
                args.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    print(
        f"{WORKERS} workers learn bytes ({args.size}, benchmarks/elastic_worker.py); every {args.every:g} s one is "
        "killed and the one that is started in its place joins. Stall: how much longer than the median step the one of "
        "the join took, at whom it took longest; over joins the median (the least to the most).\n\n"
        f"{markdown([row(each) for each in found])}\n\n{provenance()}"
    )


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--joins", type=int, default=8)
    options.add_argument("--every", type=float, default=15.0, metavar="SECONDS", help="between losses, at least")
    options.add_argument("--networks", nargs="+", default=[UNLIMITED, "100mbit,20ms"], metavar="SPEC")
    options.add_argument("--recipes", nargs="+", default=RECIPES)
    options.add_argument("--size", default="small", help="of the model: tiny, small, base")
    options.add_argument("--json", type=Path, metavar="FILE", help="all that was found, too, after every run")
    options.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the logs there")
    options.add_argument("--quick", action="store_true", help="two joins on one network")
    main(options.parse_args())
