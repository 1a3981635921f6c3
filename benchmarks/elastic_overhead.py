"""Overhead of elasticity: the step of a run whose workers may come and go, over that of one with a fixed number.

The same script on the same machine, runs that take turns, and who is first alternates. Nobody comes or goes.

    python benchmarks/elastic_overhead.py [--pairs 5] [--steps 400] [--recipes RECIPE ...] [--size small] [--json FILE]
    python benchmarks/elastic_overhead.py --quick       # two pairs of one recipe, to see that it runs
"""

import argparse
import json
import statistics
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.elastic_runs import committed, read, run, spread  # found only after the line above
from benchmarks.provenance import provenance
from benchmarks.report import markdown

WORKERS = 4
FIXED, ELASTIC = str(WORKERS), f"{WORKERS}:{WORKERS}"
RECIPES = ["Dense()", "TopK(density=0.01)"]
WARM_UP = 20
TARGET = 1.01
SLOWEST_SECONDS = 5.0  # of a step


class Steps(NamedTuple):
    """Seconds of one run's steps."""

    median: float
    processor: float  # on average, of one worker


def steps_of(workers: str, recipe: str, args: argparse.Namespace) -> Steps:
    script = ["--steps", str(WARM_UP + args.steps), "--size", args.size]
    with run(workers, ["--recipe", recipe], script) as running:
        code = running.wait(60.0 + SLOWEST_SECONDS * (WARM_UP + args.steps))
        processes = read(running.folder)
        if code or len(processes) != WORKERS:
            raise SystemExit(f"--workers {workers} --recipe {recipe!r} ended with {code}:\n{running.text[-3000:]}")
    moments = sorted(committed(processes).values())[WARM_UP:]
    processor = statistics.fmean(each.end["processor_seconds"] for each in processes if each.end is not None)
    return Steps(statistics.median(late - early for early, late in pairwise(moments)), processor)


def measure(recipe: str, args: argparse.Namespace) -> dict[str, list[Steps]]:
    found: dict[str, list[Steps]] = {FIXED: [], ELASTIC: []}
    for number in range(args.pairs):
        for workers in (FIXED, ELASTIC)[:: -1 if number % 2 else 1]:
            found[workers].append(steps_of(workers, recipe, args))
        over = found[ELASTIC][-1].median / found[FIXED][-1].median
        print(f"{recipe}: pair {number + 1} of {args.pairs}: {over:.3f}", file=sys.stderr, flush=True)
    return found


def row(recipe: str, found: dict[str, list[Steps]]) -> dict[str, str]:
    pairs = list(zip(found[FIXED], found[ELASTIC], strict=True))
    over = [ours.median / fixed.median for fixed, ours in pairs]
    return {
        "": recipe,
        "fixed, ms": spread([1000 * each.median for each in found[FIXED]], 1),
        "elastic, ms": spread([1000 * each.median for each in found[ELASTIC]], 1),
        "elastic over fixed": spread(over, 3),
        "processor time, fixed, ms": spread([1000 * each.processor for each in found[FIXED]], 1),
        "elastic over fixed, of it": spread([ours.processor / fixed.processor for fixed, ours in pairs], 3),
        f"at most {TARGET}": "yes" if statistics.median(over) <= TARGET else "no",
    }


def main(args: argparse.Namespace) -> None:
    if args.quick:
        args.pairs, args.steps, args.recipes = 2, 100, RECIPES[:1]
    found: dict[str, dict[str, list[Steps]]] = {}
    for recipe in args.recipes:
        found[recipe] = measure(recipe, args)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1))
    print(
        f"{WORKERS} workers learn bytes ({args.size}, benchmarks/elastic_worker.py). Median step of {args.steps} after "
        f"{WARM_UP}, with --workers {ELASTIC} over --workers {FIXED}; of {args.pairs} pairs of runs the median (the "
        "least to the most). Processor time: of one worker, a step, on average.\n\n"
        f"{markdown([row(*each) for each in found.items()])}\n\n{provenance()}"
    )


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--pairs", type=int, default=5)
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--recipes", nargs="+", default=RECIPES)
    options.add_argument("--size", default="small", help="of the model: tiny, small, base")
    options.add_argument("--json", type=Path, metavar="FILE", help="all that was measured, too, after every recipe")
    options.add_argument("--quick", action="store_true", help="two pairs of one recipe")
    main(options.parse_args())
