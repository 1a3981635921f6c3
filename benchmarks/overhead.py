"""Overhead of Dense() where there is nothing to save: its seconds per step over DistributedDataParallel's.

Two workers on this machine train two copies of one model in turns, in the same processes: a block of steps
with DDP, a block with Gossamer, then the other way round. Whatever else the machine does slows both alike,
and each pair of blocks gives one ratio. With --check the plain way is Gossamer itself with verify="off", so that the
ratio is what the checksums of parameters cost that find ranks that part.

    python benchmarks/overhead.py [--check] [--json FILE]
"""

import argparse
import copy
import json
import os
import random
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer.comm.environment.host_info import machine

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2
Step = Callable[[], None]


class Pieces(nn.Module):
    """200 tensors of 1,000 elements: hardly any arithmetic, so a step is bookkeeping and messages."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.ParameterList(torch.randn(1000) for _ in range(200))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(piece * x).sum() for piece in self.pieces]).sum()


def bytelm(batch: int = 8) -> tuple[nn.Module, Tensor]:
    sys.path.insert(0, str(ROOT))
    from examples.bytelm import CONTEXT, SIZES, ByteLM

    return ByteLM(*SIZES["base"]), torch.randint(256, (batch, CONTEXT + 1))


def pieces() -> tuple[nn.Module, Tensor]:
    return Pieces(), torch.randn(1000)


CASES = {"bytelm base, batch 8": (bytelm, 5), "200 tensors of 1,000": (pieces, 50)}  # and steps in a block


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Step:
    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds_per_step(step: Step, steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - began) / steps


def alternate(plain: Step, ours: Step, blocks: int, steps: int) -> list[tuple[float, float]]:
    """(plain, ours) seconds per step of each pair of blocks; who goes first alternates."""
    seconds_per_step(plain, 2 * steps), seconds_per_step(ours, 2 * steps)  # warm-up
    pairs: list[tuple[float, float]] = []
    for block in range(blocks):
        if block % 2:
            late = seconds_per_step(ours, steps)
            pairs.append((seconds_per_step(plain, steps), late))
        else:
            pairs.append((seconds_per_step(plain, steps), seconds_per_step(ours, steps)))
    return pairs


def bootstrap(values: Sequence[float], resamples: int = 10_000) -> tuple[float, float]:
    """The 95 % interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(resamples))
    return medians[round(0.025 * resamples)], medians[round(0.975 * resamples) - 1]


def measure(case: str, blocks: int, rank: int, check: bool) -> dict[str, Any]:
    torch.manual_seed(rank)  # other data on each worker; both engines begin with rank 0's model
    build, steps = CASES[case]
    model, x = build()
    twin = copy.deepcopy(model)
    optimizer, theirs = torch.optim.AdamW(twin.parameters()), torch.optim.AdamW(model.parameters())
    with ExitStack() as stack:
        if check:
            stack.enter_context(gossamer.attach(model, theirs, "Dense()", verify="off"))
        wrapped = model if check else DistributedDataParallel(model, gradient_as_bucket_view=True)
        stack.enter_context(gossamer.attach(twin, optimizer, "Dense()"))
        pairs = alternate(stepper(wrapped, theirs, x), stepper(twin, optimizer, x), blocks, steps)
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    ratios = [ours / plain for plain, ours in pairs]
    return {
        "case": case,
        "ddp_seconds_per_step": statistics.median(plain for plain, _ in pairs),
        "gossamer_seconds_per_step": statistics.median(ours for _, ours in pairs),
        "ratio": statistics.median(ratios),
        "ratio_interval": bootstrap(ratios),
        "blocks": blocks,
        "steps_per_block": steps,
        "same_parameters": same,
    }


def show(report: dict[str, Any]) -> None:
    print("machine ", ", ".join(f"{name} {value}" for name, value in report["machine"].items()))
    print("command ", report["command"])
    plainly = "unchecked" if report["check"] else "DDP"
    print(f"{'':24}{plainly:>12}{'Gossamer':>12}{'ratio':>9}   95 % interval")
    for row in report["cases"]:
        plain, ours = 1000 * row["ddp_seconds_per_step"], 1000 * row["gossamer_seconds_per_step"]
        low, high = row["ratio_interval"]
        print(f"{row['case']:24}{plain:9.2f} ms{ours:9.2f} ms{row['ratio']:9.3f}   {low:.3f} to {high:.3f}")
        print(f"{'':24}parameters bit for bit {'equal' if row['same_parameters'] else 'DIFFERENT'} at the end")


def work(args: argparse.Namespace) -> None:
    world = gossamer.init()
    report = {
        "machine": {
            **machine(),
            "threads_per_worker": torch.get_num_threads(),
            "load_average": os.getloadavg()[0],
        },
        "command": shlex.join(["python", *sys.argv]),
        "check": args.check,
        "cases": [measure(case, args.blocks, world.rank, args.check) for case in CASES],
    }
    if world.is_first:
        show(report)
        if args.json:
            Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


def launch(size: int = WORKERS, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> int:
    """This script again, once per worker, on loopback, with further arguments and variables."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // size)),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, *sys.argv, *arguments],
            env={**os.environ, **shared, **(environment or {}), "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in map(str, range(size))
    ]
    return max(abs(worker.wait()) for worker in workers)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Dense() over DistributedDataParallel, two workers on loopback.")
    options.add_argument("--blocks", type=int, default=12, help="pairs of blocks")
    options.add_argument("--check", action="store_true", help='over verify="off" instead of DistributedDataParallel')
    options.add_argument("--json", metavar="FILE")
    args = options.parse_args()
    if "RANK" not in os.environ:
        sys.exit(launch())
    work(args)
