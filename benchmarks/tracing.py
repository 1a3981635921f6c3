"""Overhead of tracing: the seconds of a step whose spans are recorded over those of one whose are not.

Two workers on this machine train one model in the same processes, a block of steps with spans and a block without, then
the other way round: whatever else the machine does slows both alike, and each pair of blocks gives one ratio. Processor
seconds are told beside, which a busy machine does not stretch. What a step's records cost at least is told as well: how
many there are, times what one costs in a loop, so that a share which the pairs cannot resolve is known all the same.

    python benchmarks/tracing.py [--blocks 40] [--cases CASE ...] [--recipe RECIPE]
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.elastic_runs import spread  # found only after the line above
from benchmarks.overhead import CASES, Step, bootstrap, launch, stepper
from benchmarks.provenance import provenance
from benchmarks.report import markdown

import gossamer
from gossamer.base.spans import active
from gossamer.base.spans.record_format import RECORD, SpanKind
from gossamer.base.spans.recorder import SpanRecorder
from gossamer.base.spans.step_range import StepRange

TARGET = 1.03


class Block(NamedTuple):
    """Seconds of a step."""

    wall: float
    processor: float  # of all threads of this worker


def block(step: Step, steps: int) -> Block:
    began, busy = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return Block((time.perf_counter() - began) / steps, (time.process_time() - busy) / steps)


def record_seconds() -> float:
    """Of the recording thread's processor, for one span: the median of many loops, without packing and writing."""
    costs, count = [], 5000
    with tempfile.TemporaryDirectory() as folder:
        recorder = SpanRecorder(Path(folder), 0, 1, StepRange())
        for _ in range(50):
            began = time.thread_time()
            for number in range(count):
                recorder.add(SpanKind.ENCODE, 1.0, 2.0, number)
            costs.append((time.thread_time() - began) / count)
            recorder.write()
        recorder.close()
    return statistics.median(costs)


def measure(case: str, recipe: str, blocks: int, rank: int, folder: Path) -> dict[str, str]:
    """A row of the table."""
    torch.manual_seed(rank)
    build, steps = CASES[case]
    model, x = build()
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = active.begin(folder, rank, 2)
    pairs: list[tuple[Block, Block]] = []
    with gossamer.attach(model, optimizer, recipe):
        step = stepper(model, optimizer, x)
        block(step, 2 * steps)  # warm-up
        for number in range(blocks):
            found = {}
            for on in (False, True)[:: -1 if number % 2 else 1]:
                active.recorder = recorder if on else None
                found[on] = block(step, steps)
            pairs.append((found[False], found[True]))
    active.recorder = recorder
    active.end()
    written = recorder.path.stat().st_size / ((blocks + 2) * steps)
    walls, processors = ([on[which] / off[which] for off, on in pairs] for which in range(2))
    low, high = bootstrap(walls)
    share = written / RECORD.size * record_seconds() / statistics.median(off.wall for off, _ in pairs)
    return {
        "": case,
        "off, ms": spread([1000 * off.wall for off, _ in pairs], 1),
        "on over off": f"{statistics.median(walls):.3f} ({low:.3f} to {high:.3f})",
        "of processor time": "{:.3f} ({:.3f} to {:.3f})".format(statistics.median(processors), *bootstrap(processors)),
        "records a step": f"{written / RECORD.size:.1f}",
        "their share of a step": f"{100 * share:.4f} %",
        f"at most {TARGET}": "yes" if statistics.median(walls) <= TARGET else "no",
    }


def main(args: argparse.Namespace) -> None:
    world = gossamer.init()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(case, args.recipe, args.blocks, world.rank, Path(folder)) for case in args.cases]
    if world.is_first:
        print(
            f"Two workers, {args.recipe}, {args.blocks} pairs of blocks; medians of the ratios of pairs, with the 95 % "
            f"interval of the median; a record takes {1e6 * record_seconds():.2f} us; load average "
            f"{os.getloadavg()[0]:.1f}.\n\n{markdown(rows)}\n\n{provenance()}"
        )


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--blocks", type=int, default=40, help="pairs of blocks")
    options.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    options.add_argument("--recipe", default="Dense()")
    arguments = options.parse_args()
    if "RANK" not in os.environ:
        sys.exit(launch())
    main(arguments)
