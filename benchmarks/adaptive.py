"""Adaptive(TopK) beside TopK: losses of unlike tasks for as many bytes, and how many bytes TopK takes to end there.

Four workers are simulated in one process, with real aggregations. TopK is trained with a grid of densities; between
those that were trained its loss is read off a line through the logarithms of bytes and loss. PowerSGD stands beside
them. What was trained is kept in --json, and not trained again.

    python benchmarks/adaptive.py [--tasks NAME ...] [--densities D ...] [--seeds N] [--steps N] [--page FILE]
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import exp, inf, log
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.kept import read, verify_rows, write  # found only after the line above
from benchmarks.losses import Losses, number
from benchmarks.markdown_tables import named_rows
from benchmarks.page import PAGE, put_between
from benchmarks.provenance import QUICK, provenance, scratch
from benchmarks.side_by_side import done, one_thread
from benchmarks.tasks import TASKS, UNLIKE
from benchmarks.training import Run, train

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base.units import bytes_text
from gossamer.plan.bench import machine

WORKERS = 4
KNOWN = {**TASKS, **UNLIKE}
BESIDE = ("PowerSGD(rank=1)", "PowerSGD(rank=4)")


class Job(NamedTuple):
    task: str
    compressor: str
    seed: int
    steps: int


class Curve(NamedTuple):
    """What one compressor's densities cost, by rising bytes: (bytes a step and worker, loss) of each."""

    points: tuple[tuple[float, float], ...]

    def loss_for(self, sent: float) -> float:
        """The loss for so many bytes; beyond the ends the line of the last two goes on."""
        return _on_a_line(sent, self.points)

    def bytes_for(self, loss: float) -> float | None:
        """The fewest bytes for so little loss; None where no density that was trained is as good, or all are."""
        for (fewer, worse), (more, better) in pairwise(self.points):
            if worse > loss >= better:
                return _on_a_line(loss, ((better, more), (worse, fewer)))
        return None


def _on_a_line(x: float, points: Sequence[tuple[float, float]]) -> float:
    """Between two of the points, in order of their first numbers, by a straight line through logarithms."""
    right = next((place for place, (at, _) in enumerate(points) if at >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(right, 1) - 1], points[max(right, 1)]
    return exp(log(y0) + (log(y1) - log(y0)) * (log(x) - log(x0)) / (log(x1) - log(x0)))


def top_k(density: float) -> str:
    return f"TopK(density={density:g})"


def adaptive(density: float) -> str:
    return f"Adaptive(TopK(density={density:g}))"


def densest(densities: Sequence[float]) -> float:
    """One density more, so that a line goes on to where TopK is as good."""
    return 3 * max(densities)


def jobs(args: argparse.Namespace) -> list[Job]:
    """Seed by seed, and what is compared first, so that a part of them tells something already."""
    pairs = [text(density) for density in args.densities for text in (top_k, adaptive)]
    wanted = [*pairs, top_k(densest(args.densities)), *BESIDE]
    return [Job(task, text, seed, args.steps) for seed in range(args.seeds) for text in wanted for task in args.tasks]


def key(run: Run) -> Job:
    return Job(run["task"], run["compressor"], run["seed"], run["steps"])


def is_current(run: Run) -> bool:
    """Whether the recipe of a kept run still resolves to what was trained."""
    return run["resolved"] == repr(resolve(run["compressor"], world=WORKERS).compressor)


def do(job: Job) -> Run:
    return train(job.task, KNOWN[job.task], job.compressor, job.seed, job.steps, WORKERS, job.steps)


def train_all(args: argparse.Namespace) -> dict[Job, Run]:
    """All wanted runs, kept ones and new ones; the file is written after every run."""
    wanted = jobs(args)
    runs = {key(run): run for run in read(args.json) if is_current(run)}
    missing = [] if args.kept else [job for job in wanted if job not in runs]
    for count, run in enumerate(done(do, missing, args.processes, one_thread), start=1):
        runs[key(run)] = run
        write(args.json, {"machine": machine(), "runs": list(runs.values())})
        print(f"{count} of {len(missing)}: {run['task']}, {run['compressor']}", file=sys.stderr, flush=True)
    return {job: runs[job] for job in wanted if job in runs}


class Measured(NamedTuple):
    """losses: by seed, those of the samples to learn from that are followed; sent: bytes a step and worker."""

    losses: Losses
    sent: float


def measured(runs: Mapping[Job, Run], task: str) -> dict[str, Measured]:
    """By compressor, over the seeds with which all densities of Adaptive(TopK) and TopK's of the same were trained.

    What stands beside them, of these seeds, has those that it was trained with.
    """
    by_text: dict[str, dict[int, Run]] = {}
    for job, run in runs.items():
        if job.task == task:
            by_text.setdefault(run["compressor"], {})[run["seed"]] = run
    inner = {text: text.removeprefix("Adaptive(").removesuffix(")") for text in by_text if text.startswith("Adaptive")}
    seeds = set.intersection(*(set(by_text[text]) for pair in inner.items() for text in pair if text in by_text))
    return {
        text: _over([run for seed, run in sorted(found.items()) if seed in seeds])
        for text, found in by_text.items()
        if seeds & set(found)
    }


def _over(runs: Sequence[Run]) -> Measured:
    return Measured(
        Losses(tuple(number(run["curve"][-1][2]) for run in runs)),
        statistics.fmean(run["curve"][-1][1] / run["steps"] for run in runs),
    )


def compared(found: Mapping[str, Measured], densities: Sequence[float]) -> Iterator[tuple[float, Measured, Measured]]:
    """(density, TopK, Adaptive) where both were trained."""
    for density in densities:
        if {top_k(density), adaptive(density)} <= found.keys():
            yield density, found[top_k(density)], found[adaptive(density)]


def table(task: str, found: Mapping[str, Measured], densities: Sequence[float]) -> Iterator[str]:
    ends = [found[top_k(density)] for density in (*densities, densest(densities)) if top_k(density) in found]
    curve = Curve(tuple(sorted((each.sent, each.losses.mean) for each in ends if each.losses.mean < inf)))
    yield f"### Adaptive, {task}\n"
    yield f"{KNOWN[task].about}; seeds: {len(ends[0].losses.values)}.\n"
    yield "| density | TopK | sent | Adaptive(TopK) | sent | loss over TopK's for these bytes | TopK's bytes |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for density, plain, spread in compared(found, densities):
        takes = curve.bytes_for(spread.losses.mean)
        cells = [
            f"{density:g}", str(plain.losses), bytes_text(plain.sent), str(spread.losses), bytes_text(spread.sent),
            f"{spread.losses.mean / curve.loss_for(spread.sent):.3f}",
            "-" if takes is None else f"{takes / spread.sent:.2f} times",
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |"
    others = [f"`{text}` {found[text].losses} for {bytes_text(found[text].sent)}" for text in BESIDE if text in found]
    if others:
        yield f"\nFor comparison: {'; '.join(others)}."


def summary(runs: Mapping[Job, Run], args: argparse.Namespace) -> str:
    """In how many cases it ends lower with as many entries, and by how much."""
    ratios = {
        task: [
            spread.losses.mean / plain.losses.mean
            for _, plain, spread in compared(measured(runs, task), args.densities)
        ]
        for task in args.tasks
    }
    every = [ratio for each in ratios.values() for ratio in each]
    means = ", ".join(f"{task} {statistics.geometric_mean(each):.3f}" for task, each in ratios.items())
    return (
        f"With the same number of entries: less loss in {sum(ratio < 1 for ratio in every)} of {len(every)} cases, "
        f"between {min(every):.3f} and {max(every):.3f} times that of TopK; geometric means by task: {means}."
    )


def page_part(runs: Mapping[Job, Run], args: argparse.Namespace) -> str:
    about = (
        f"Four simulated workers in one process, with real aggregations, {args.steps} steps; mean over seeds ± "
        "standard deviation of the training loss on fixed samples; sent: bytes per worker and step. TopK's bytes: the "
        "factor of bytes that TopK needs for the same loss; -: no trained density reaches it.\n\n"
        "Adaptive distributes the entries of TopK over the tensors in proportion to sqrt(n E), n the size and E the "
        "residual energy of a tensor."
    )
    tables = ["\n".join(table(task, measured(runs, task), args.densities)) for task in args.tasks]
    return "\n\n".join([about, provenance(), summary(runs, args), *tables])


def main(args: argparse.Namespace) -> None:
    if args.quick:
        args.tasks, args.densities, args.seeds, args.steps = ["embeddings"], [0.01, 0.03], 2, 4
        args.json, args.page = QUICK / args.json.name, args.page and scratch(args.page)
    if args.verify:
        args.page, args.json = args.page or PAGE, QUICK / f"verified-{args.json.name}"
        args.json.unlink(missing_ok=True)
    found = page_part(train_all(args), args)
    print(found)
    if args.verify:
        verify_rows(args.page, "adaptive", named_rows(found))
        return
    if args.page:
        put_between(args.page, "adaptive", found)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Adaptive(TopK) beside TopK.")
    tried = ["digits-conv", "digits-resnet", "bytelm", "bytelm-adamw", *UNLIKE]
    parser.add_argument("--tasks", nargs="+", choices=KNOWN, default=tried, metavar="NAME")
    parser.add_argument("--densities", nargs="+", type=float, default=[0.003, 0.01, 0.03])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--processes", type=int, default=1, help="trainings at once")
    parser.add_argument("--kept", action="store_true", help="train nothing, and tell of what is kept")
    parser.add_argument("--json", type=Path, default=Path("runs/adaptive.json"), metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="a few steps, in files of their own")
    parser.add_argument("--verify", action="store_true", help="compare with the rows of --page, and note it there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables there")
    return parser


if __name__ == "__main__":
    main(options().parse_args())
