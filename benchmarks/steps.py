"""CPU time of a training step over DistributedDataParallel's, for each recipe and by activity, without a network limit.

Every worker trains a copy of one model with DDP and one with each recipe, in the same processes and in turns: a short
block of steps each. CPU time, user and system, of all threads of all workers, depends far less on the load of the
machine than seconds do. Each round gives every recipe one ratio to that round's DDP.

The training thread computes the model and runs hooks. The communication thread encodes, sends and receives (wire), and
decodes; its remaining time is bookkeeping, such as copies into buckets. Other threads are Gloo's.

On a quiet machine, compare the seconds as well:

    python benchmarks/steps.py --page docs/benchmarks/steps.md
    python benchmarks/steps.py [--workers 4] [--rounds N] [--recipe R ...] [--case base|small] [--json FILE]
"""

import argparse
import copy
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.overhead import Pieces, Step, bootstrap, bytelm, launch, stepper  # found only after the line above
from benchmarks.provenance import provenance

import gossamer
from gossamer.base import figures, runner
from gossamer.events import Event, StepEnded

DDP = "DistributedDataParallel"
RECIPES = ("Dense()", "Int8()", "Float4()", "TopK(0.01)", "PowerSGD(rank=4)")
WORKERS_NOTE = (
    "How much does a step cost over DDP's where the network is no limit?\n\n"
    "{workers} workers on one machine train copies of one model with DDP and with each recipe, in turns of a few "
    "steps, in the same processes. CPU time is of all threads of a worker; the ratios are medians of {rounds} pairs, "
    "with 95 % intervals. The training thread computes the model. The communication thread encodes, sends and receives "
    "(wire) and decodes. Other threads are Gloo's, and the bookkeeping of the communication thread. The load average "
    "was {load:.1f}; seconds are reliable only on a quiet machine. An interval that contains 1 shows no difference to "
    "DDP."
)
ACTIVITIES = ("training thread", "encode", "wire", "decode", "other threads")
SECONDS = "seconds"
Spent = dict[str, float]  # CPU milliseconds per step and worker, by activity; and the step's milliseconds


class CommunicationClock:
    """Adds the CPU time that communication threads spend in scripts, by activity."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("encode", "wire", "decode"), 0.0)
        runner.time = SimpleNamespace(perf_counter=time.thread_time)  # type: ignore[attr-defined, assignment]
        gossamer.events.subscribe(self._add)

    def _add(self, event: Event) -> None:
        if isinstance(event, StepEnded):
            for name in self.seconds:
                self.seconds[name] += getattr(event, f"{name}_seconds")

    def now(self) -> Spent:
        """CPU seconds of this process until now, by activity; and the time."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        found = {"training thread": time.thread_time(), **self.seconds}
        others = used.ru_utime + used.ru_stime - sum(found.values())
        return {**found, "other threads": others, SECONDS: time.perf_counter()}


def block(step: Step, steps: int, world: gossamer.World, clock: CommunicationClock) -> Spent:
    """Milliseconds per step, the mean of all workers."""
    world.barrier()
    began = clock.now()
    for _ in range(steps):
        step()
    ended = clock.now()
    spent = torch.tensor([ended[name] - began[name] for name in began], dtype=torch.float64)
    return dict(zip(began, (1000 / steps * world.all_reduce(spent, "mean")).tolist(), strict=True))


def cpu(spent: Spent) -> float:
    return sum(spent[name] for name in ACTIVITIES)


def in_turn(
    steps: Sequence[tuple[str, Step]], rounds: int, size: int, world: gossamer.World
) -> Iterator[dict[str, Spent]]:
    """The blocks of each round; the order turns, and the first round warms up."""
    clock = CommunicationClock()
    for turn in range(rounds + 1):
        place = turn % len(steps)
        found = {name: block(step, size, world, clock) for name, step in (*steps[place:], *steps[:place])}
        if turn:
            yield found


def pieces() -> tuple[nn.Module, Tensor]:
    return Pieces(), torch.randn(1000)


CASES = {  # and steps in a block
    "base": ("examples/bytelm.py base, 3.3 million parameters, batch 8", bytelm, 4),
    "small": ("200 tensors of 1,000 elements", pieces, 20),
}


def measure(case: str, args: argparse.Namespace, world: gossamer.World) -> list[dict[str, Any]]:
    torch.manual_seed(world.rank)  # other data on each worker; all begin with rank 0's model
    texts = args.recipe or RECIPES
    _, build, size = CASES[case]
    model, x = build()
    with ExitStack() as stack:
        steps: list[tuple[str, Step]] = []

        def add(text: str) -> None:
            twin = copy.deepcopy(model)
            optimizer = torch.optim.AdamW(twin.parameters())
            if text == DDP:
                steps.append((text, stepper(DistributedDataParallel(twin, gradient_as_bucket_view=True), optimizer, x)))
                return
            stack.enter_context(gossamer.attach(twin, optimizer, text))
            steps.append((text, stepper(twin, optimizer, x)))

        for text in (DDP, *texts):
            add(text)
        found = list(in_turn(steps, args.rounds, args.steps or size, world))
    return [row(text, found) for text in (DDP, *texts)]


def row(text: str, found: Sequence[dict[str, Spent]]) -> dict[str, Any]:
    milliseconds = sorted(cpu(each[text]) for each in found)
    ratios = [cpu(each[text]) / cpu(each[DDP]) for each in found]
    seconds = [each[text][SECONDS] / each[DDP][SECONDS] for each in found]
    return {
        "recipe": text,
        "cpu_ms": statistics.median(milliseconds),
        "cpu_ms_quartiles": [milliseconds[len(found) // 4], milliseconds[-1 - len(found) // 4]],
        "ratio": statistics.median(ratios),
        "ratio_interval": bootstrap(ratios, 2000),
        "seconds_ratio": statistics.median(seconds),
        "seconds_ratio_interval": bootstrap(seconds, 2000),
        "activities": {name: statistics.median(each[text][name] for each in found) for name in ACTIVITIES},
        "rounds": len(found),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A row for each recipe. The ratios to DDP are medians of pairs, with their 95 % intervals."""
    heads = ("", "CPU ms per step and worker", "over DDP", "seconds over DDP", *ACTIVITIES)
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 1)}"]
    for each in rows:
        low, high = each["cpu_ms_quartiles"]
        shown = f"{each['cpu_ms']:.2f} ({low:.2f} to {high:.2f})"
        parts = [f"{each['activities'][name]:.2f}" for name in ACTIVITIES]
        cells = each["recipe"], shown, ratio(each, "ratio"), ratio(each, "seconds_ratio"), *parts
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page(report: dict[str, Any], picture: str) -> str:
    text = (
        f"# The cost of a step without a network limit\n\n{WORKERS_NOTE.format(**report)}\n\n{provenance()}\n\n"
        f"![CPU time of a step by activity, for each recipe]({picture})\n"
    )
    return text + "".join(f"\n## {CASES[case][0]}\n\n{table(rows)}\n" for case, rows in report["cases"].items())


def ratio(found: dict[str, Any], name: str) -> str:
    low, high = found[f"{name}_interval"]
    return f"{found[name]:.3f} ({low:.3f} to {high:.3f})"


def draw(report: dict[str, Any], path: Path) -> None:
    """A bar for each recipe, divided into activities."""
    cases = report["cases"]
    figure = figures.figure(7.5, 0.6 + 2.4 * len(cases), dpi=120)
    every = figure.subplots(len(cases), 1, squeeze=False)[:, 0]
    for axes, (case, rows) in zip(every, cases.items(), strict=True):
        left = [0.0] * len(rows)
        for activity in ACTIVITIES:
            widths = [max(0.0, each["activities"][activity]) for each in rows]
            axes.barh([each["recipe"] for each in rows], widths, left=left, label=activity)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.invert_yaxis()
        figures.title(axes, CASES[case][0])
        axes.set_xlabel("CPU milliseconds per step and worker")
    figure.legend(*every[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(ACTIVITIES), fontsize=8)
    figure.savefig(path)


def work(args: argparse.Namespace) -> None:
    world = gossamer.init()
    cases = list(CASES) if args.page else [args.case]
    report = {"workers": args.workers, "rounds": args.rounds, "load": os.getloadavg()[0]}
    report["cases"] = {case: measure(case, args, world) for case in cases}
    if not world.is_first:
        return
    for case in cases:
        print(f"{CASES[case][0]}; load average {report['load']:.1f}\n{table(report['cases'][case])}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.page:
        picture = args.page.with_suffix(".png")
        draw(report, picture)
        args.page.write_text(page(report, picture.name))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="CPU time of a step over DDP's, for each recipe.")
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--rounds", type=int, default=12)
    options.add_argument("--steps", type=int, help="steps of a block")
    options.add_argument("--recipe", action="append", metavar="R", help="only this one; may be repeated")
    options.add_argument("--case", choices=CASES, default="base")
    options.add_argument("--json", type=Path, metavar="FILE")
    options.add_argument(
        "--page", type=Path, metavar="FILE.md", help="measure both cases; write the page and a picture"
    )
    args = options.parse_args()
    if "RANK" not in os.environ:
        sys.exit(launch(args.workers))
    work(args)
