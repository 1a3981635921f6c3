"""Goodput under failures: simulated for thousands of workers, and measured with eight, one of them killed every 10 s.

The simulation (benchmarks/goodput_model.py) runs in virtual time, with the failure rate of Decoupled DiLoCo
(arXiv:2604.21428). The measurement (benchmarks/goodput_real.py) needs root and takes six minutes; its results are kept
in benchmarks/results/goodput.jsonl. Writes the tables of docs/benchmarks/goodput.md between its markers, and
goodput.png next to it.

    python benchmarks/goodput.py            # simulate
    python benchmarks/goodput.py --real     # measure
    python benchmarks/goodput.py --quick    # a small simulation, into runs/quick
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.goodput_model import AsyncRun, Counted, Failures, Merging, RealServer, elastic, restart_of_all
from benchmarks.goodput_real import (  # after the line above
    ARMS,
    measure_all,
    row,
    stored,
)
from benchmarks.page import put_between
from benchmarks.provenance import ROOT, provenance, scratch
from benchmarks.report import markdown

from gossamer.algorithms.strategies.async_diloco import AsyncDiLoCo
from gossamer.base import figures

PAGE, MEASURED = ROOT / "docs" / "benchmarks" / "goodput.md", ROOT / "benchmarks" / "results" / "goodput.jsonl"
YEAR_SECONDS = 365.25 * 86400
CHIPS, MANY = 1_200_000, 10_000  # of the paper's run; workers, so that each has 120 chips
PERIOD = 24  # the paper's
RESTART_SECONDS, ELASTIC_SECONDS, LEARNER_SECONDS = 71.0, 19.0, 17.0  # fitted to the paper's goodput
HERE_SECONDS = 0.6  # an elastic run's pause for a loss and a return, measured with eight workers
STRATEGY = AsyncDiLoCo(period=PERIOD, outer_momentum=0.0)
REAL_SERVERS_UP_TO = 100  # workers; with more, merges are counted by the same rules
SIMULATED_SECONDS = 2_000_000.0  # of all workers of AsyncDiLoCo together, at least 1,000 of each
COUNTS, RATES = (100, 300, 1000, 3000, 10_000), (0.1, 0.3, 1.0, 3.0, 10.0)
SIMULATED: dict[str, Callable[[Failures, Random], float]] = {
    f"lock step, restart of all ({RESTART_SECONDS:g} s)": lambda failures, random: restart_of_all(
        failures, RESTART_SECONDS, random
    ),
    f"elastic lock step ({ELASTIC_SECONDS:g} s)": lambda failures, random: elastic(failures, ELASTIC_SECONDS, random),
    f"elastic lock step ({HERE_SECONDS:g} s)": lambda failures, random: elastic(failures, HERE_SECONDS, random),
    f"elastic DiLoCo(period={PERIOD}) ({ELASTIC_SECONDS:g} s)": lambda failures, random: elastic(
        failures, ELASTIC_SECONDS, random, PERIOD
    ),
    f"elastic DiLoCo(period={PERIOD}) ({HERE_SECONDS:g} s)": lambda failures, random: elastic(
        failures, HERE_SECONDS, random, PERIOD
    ),
    f"AsyncDiLoCo(period={PERIOD})": lambda failures, random: asynchronous(failures, random)[0],
}
PAPER = {  # chips, learners; None: lock step, with elasticity or without. Goodput as third parties report it
    (1_200_000, None, False): 0.27,
    (1_200_000, None, True): 0.58,
    (1_200_000, 8, True): 0.88,
    (1_200_000, 16, True): 0.93,
    (2_400_000, None, False): 0.18,
    (2_400_000, None, True): 0.40,
    (2_400_000, 8, True): 0.80,
    (2_400_000, 16, True): 0.86,
}


def workers_of(count: int, rate: float = 1.0) -> Failures:
    """Workers of 120 chips, each of which fails once a year on average, times `rate`."""
    return Failures(count, YEAR_SECONDS / (CHIPS / MANY) / rate)


def asynchronous(failures: Failures, random: Random) -> tuple[float, float]:
    """Goodput of AsyncDiLoCo, and the mean factor by which contributions are reduced for their age."""
    seconds = min(failures.seconds, max(1000.0, SIMULATED_SECONDS / failures.workers))
    kind: type[Merging] = RealServer if failures.workers <= REAL_SERVERS_UP_TO else Counted
    servers = kind(STRATEGY, failures.workers)
    goodput = AsyncRun(replace(failures, seconds=seconds), STRATEGY, servers, random).goodput()
    return goodput, sum(servers.factors) / len(servers.factors)


def as_in_the_paper(chips: int, learners: int | None, is_elastic: bool) -> float:
    """A run of `chips`, each of which fails once a year: lock step, or learners that merge asynchronously."""
    if learners is None:
        failures = Failures(MANY, YEAR_SECONDS / (chips / MANY))
        return elastic(failures, ELASTIC_SECONDS, Random(0)) if is_elastic else restart_of_all(
            failures, RESTART_SECONDS, Random(0)
        )  # fmt: skip
    return asynchronous(
        Failures(learners, YEAR_SECONDS / (chips / learners), LEARNER_SECONDS, 1.0, 40_000.0), Random(0)
    )[0]


def paper_table() -> Iterator[dict[str, str]]:
    for (chips, learners, is_elastic), reported in PAPER.items():
        name = f"{learners} learners" if learners else "elastic lock step" if is_elastic else "lock step"
        found = as_in_the_paper(chips, learners, is_elastic)
        yield {"chips": f"{chips:,}", "run": name, "reported": f"{reported:.2f}", "simulated": f"{found:.2f}"}


def simulate(points: Sequence[Failures]) -> dict[str, list[float]]:
    """By run, the goodput at each point."""
    found: dict[str, list[float]] = {name: [] for name in SIMULATED}
    for failures in points:
        for name, run in SIMULATED.items():
            found[name].append(run(failures, Random(0)))
        print(f"{failures.workers} workers, {failures.mean_seconds_between:.0f} s: done", file=sys.stderr, flush=True)
    return found


def table(found: dict[str, list[float]], headings: Sequence[str]) -> str:
    rows = [
        {"run": f"`{name}`" if name.startswith("Async") else name,
         **{heading: f"{value:.3f}" for heading, value in zip(headings, values, strict=True)}}
        for name, values in found.items()
    ]  # fmt: skip
    return markdown(rows)


def draw(path: Path, by_count: dict[str, list[float]], counts: Sequence[int], by_rate: dict[str, list[float]]) -> None:
    """Two panels: over the number of workers, and over the failure rate with 10,000 workers."""
    figure = figures.figure(10.6, 4.2, dpi=120)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, found, values in ((left, by_count, counts), (right, by_rate, RATES)):
        for number, (name, goodput) in enumerate(found.items()):
            color = figures.COLORS[(0, 1, 1, 2, 2, 6)[number]]
            style = "--" if f"({HERE_SECONDS:g} s)" in name else "-"
            axes.plot(values, goodput, style, color=color, marker="o", markersize=4, label=name)
        axes.set(xscale="log", ylim=(0, 1.02))
        figures.light_grid(axes)
        figures.open_frame(axes)
    figures.title(left, "by number of workers")
    figures.title(right, f"{MANY:,} workers, by failure rate")
    left.set(xlabel="workers, each of which fails every 73 hours", ylabel="goodput")
    right.set(xlabel="failures of a worker, relative to once in 73 hours")
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path)


def simulated(args: argparse.Namespace, page: Path) -> None:
    """Simulate, draw, and write the tables into the page."""
    counts, many = (COUNTS[:2], 300) if args.quick else (COUNTS, MANY)
    by_count = simulate([workers_of(count) for count in counts])
    by_rate = simulate([workers_of(many, rate) for rate in RATES])
    draw(page.with_suffix(".png"), by_count, counts, by_rate)
    put_between(page, "by failure rate", table(by_rate, [f"{rate:g} x" for rate in RATES]))
    put_between(page, "by number of workers", table(by_count, [f"{count:,}" for count in counts]))
    put_between(page, "as in the paper", markdown(list(paper_table())))
    factors = {count: asynchronous(workers_of(count), Random(0))[1] for count in (counts[0], many)}
    text = ", ".join(f"{factor:.2f} with {count:,} workers" for count, factor in factors.items())
    put_between(page, "ages", f"Mean factor of contributions by their age: {text}.\n\n{provenance()}")


def main(args: argparse.Namespace) -> None:
    page = scratch(PAGE) if args.quick else PAGE
    if args.real:
        measure_all(MEASURED, [arm for arm in ARMS if args.only in arm.recipe])
    put_between(page, "measured", markdown([row(each) for each in stored(MEASURED)]))
    if not args.real:
        simulated(args, page)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--real", action="store_true", help="measure, too")
    options.add_argument("--only", default="", metavar="TEXT", help="with --real: recipes that contain it")
    options.add_argument("--quick", action="store_true", help="a small simulation, in a file of its own")
    main(options.parse_args())
