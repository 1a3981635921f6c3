"""Many small tensors: seconds per step over DistributedDataParallel's, for every compressor there is.

200 matrices of 25 by 40, so hardly any arithmetic: a step is bookkeeping, messages and whatever a compressor does once
for each tensor. Two workers on this machine train one copy of the model with each recipe and one with DDP, in the same
processes and in turns: a short block of steps each, in an order that turns from round to round. Each round gives every
recipe one ratio to that round's DDP.

    python benchmarks/small_tensors.py [--rounds N] [--recipe R ...] [--mixed] [--json FILE]
"""

import argparse
import copy
import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.overhead import Step, bootstrap, launch, seconds_per_step, stepper  # found only after the line above

import gossamer
from gossamer.comm.environment.host_info import machine
from gossamer.plan.bench.cases import KERNELS, case_texts

DDP, SAME = "DistributedDataParallel", "Dense()"
TENSORS, ROWS, COLUMNS = 200, 25, 40
MIXED = ((64, 16), (64, 3, 3, 3), (40,), (7, 300), (16, 16, 1, 1))  # and so on: a bucket whose shapes take turns
STEPS = 20  # in a block
NEEDS_MORE = ("OneBitAdam", "Hierarchical")  # another optimizer; a topology


class Matrices(nn.Module):
    """Tensors of these shapes, each of which is multiplied by one number."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.pieces = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(piece * x).sum() for piece in self.pieces]).sum()


def shapes_of(mixed: bool) -> list[tuple[int, ...]]:
    return [MIXED[place % len(MIXED)] if mixed else (ROWS, COLUMNS) for place in range(TENSORS)]


def recipes() -> list[str]:
    """Every compressor with the hyperparameters of `gossamer bench compressors`, and nothing lossy beside DDP."""
    return [SAME, *(text for text in case_texts(KERNELS) if text.partition("(")[0] not in NEEDS_MORE)]


def in_turn(steps: Sequence[tuple[str, Step]], rounds: int) -> Iterator[dict[str, float]]:
    """Seconds per step of everyone's block in each round; the first round warms up and is not told."""
    for turn in range(rounds + 1):
        place = turn % len(steps)
        found = {name: seconds_per_step(step, STEPS) for name, step in (*steps[place:], *steps[:place])}
        if turn:
            yield found


def measure(texts: Sequence[str], mixed: bool, rounds: int, rank: int) -> list[dict[str, Any]]:
    torch.manual_seed(rank)  # other data on each worker; all begin with rank 0's model
    model, x = Matrices(shapes_of(mixed)), torch.randn(())
    with ExitStack() as stack:
        steps: list[tuple[str, Step]] = []

        def add(name: str, wrap: Callable[[nn.Module, torch.optim.Optimizer], nn.Module]) -> nn.Module:
            twin = copy.deepcopy(model)
            optimizer = torch.optim.SGD(twin.parameters(), lr=1e-3, momentum=0.9)
            steps.append((name, stepper(wrap(twin, optimizer), optimizer, x)))
            return twin

        def attached(text: str) -> Callable[[nn.Module, torch.optim.Optimizer], nn.Module]:
            def wrap(twin: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
                stack.enter_context(gossamer.attach(twin, optimizer, text))
                return twin

            return wrap

        add(DDP, lambda twin, _: DistributedDataParallel(twin, gradient_as_bucket_view=True))
        for text in texts:
            add(text, attached(text))
        found = list(in_turn(steps, rounds))
    return [_row(text, found) for text in texts]


def _row(text: str, found: Sequence[dict[str, float]]) -> dict[str, Any]:
    ratios = [each[text] / each[DDP] for each in found]
    return {
        "recipe": text,
        "ddp_seconds_per_step": statistics.median(each[DDP] for each in found),
        "gossamer_seconds_per_step": statistics.median(each[text] for each in found),
        "ratio": statistics.median(ratios),
        "ratio_interval": bootstrap(ratios, 2000),
        "rounds": len(found),
        "steps_per_block": STEPS,
    }


def show(report: dict[str, Any]) -> None:
    print("machine ", ", ".join(f"{name} {value}" for name, value in report["machine"].items()))
    print("command ", report["command"])
    print(f"{'':48}{'DDP':>12}{'Gossamer':>12}{'ratio':>9}   95 % interval")
    for row in report["recipes"]:
        plain, ours = 1000 * row["ddp_seconds_per_step"], 1000 * row["gossamer_seconds_per_step"]
        low, high = row["ratio_interval"]
        print(f"{row['recipe']:48}{plain:9.2f} ms{ours:9.2f} ms{row['ratio']:9.3f}   {low:.3f} to {high:.3f}")


def work(args: argparse.Namespace) -> None:
    world = gossamer.init()
    texts = args.recipe or recipes()
    report = {
        "machine": {
            **machine(),
            "threads_per_worker": torch.get_num_threads(),
            "load_average": os.getloadavg()[0],
        },
        "command": shlex.join(["python", *sys.argv]),
        "mixed": args.mixed,
        "recipes": measure(texts, args.mixed, args.rounds, world.rank),
    }
    if world.is_first:
        show(report)
        if args.json:
            Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Every compressor over DDP on many small tensors, two workers.")
    options.add_argument("--rounds", type=int, default=25)
    options.add_argument("--recipe", action="append", metavar="R", help="only this one; may be repeated")
    options.add_argument("--mixed", action="store_true", help="matrices, kernels and vectors of several shapes")
    options.add_argument("--json", metavar="FILE")
    args = options.parse_args()
    if "RANK" not in os.environ:
        sys.exit(launch())
    work(args)
