"""Means, sums in parts and gathers by Gossamer's tables of hops, beside Gloo's own, in one interleaved run.

Every round times every row once, from a moment at which all are there; a row's time is that of its slowest worker.
Medians over rounds, and the ratio to Gloo of the same round; on a network also what was foretold. Started by itself it
starts its workers: on this machine's loopback, or each on a host of its own on an emulated network.

    python benchmarks/collectives.py [--workers 2 4] [--network SPEC] [--megabytes 100] [--rounds 9] [--small]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gossamer
from gossamer.collectives import COLLECTIVES, Collective, Direct, Hop
from gossamer.environment.servers import own_address
from gossamer.network import read_network
from gossamer.network.choose import fastest, table_seconds
from gossamer.transports.greeting import connect
from gossamer.transports.links import Links
from gossamer.transports.mesh import Mesh
from gossamer.transports.meshed import MeshTransport, meshed
from gossamer.transports.picker import Picker
from gossamer.transports.process_group import ProcessGroupTransport
from gossamer.words import Gather, Mean

ROOT = Path(__file__).resolve().parent.parent
ENGINE = "gloo"
WARM_UP = 2  # uses, after which windows have grown to what the path holds
MEAN, HALF, SCATTER, GATHER = "mean, float32", "mean, bfloat16", "reduce-scatter, float32", "all-gather, float32"


@dataclass(frozen=True)
class Row:
    """One way to do one thing. act: does it once, on tensors that are there already."""

    what: str
    how: str
    act: Callable[[], object]


class Always(Picker):
    """Picks the same table whatever is asked."""

    def __init__(self, table: Collective) -> None:
        super().__init__("auto", Links((), 1.0))
        self._table = table

    def __call__(self, nbytes: int, itemsize: int, ranks: tuple[int, ...]) -> Collective:
        return self._table


class Scattered(Direct):
    """The first half of a direct mean: every part is summed by its owner."""

    def _hops(self, rank: int, world: int) -> Iterator[Hop]:
        return (hop for hop in super()._hops(rank, world) if hop.round == 0)


def tables() -> dict[str, Collective]:
    return {name: made(per_node=2) if name == "hierarchical" else made() for name, made in COLLECTIVES.items()}


def numel_of(megabytes: float, world: int) -> int:
    return int(megabytes * 1e6) // 4 // world * world


def rows(megabytes: float, small: bool) -> tuple[list[Row], Callable[[], None]]:
    """What to time, and what brings all workers to the same moment."""
    world = gossamer.init()
    engine = ProcessGroupTransport()
    automatic = meshed(engine, own_address())
    mesh = Mesh(world.rank, connect(world.rank, world.size, own_address(), engine.gather_text))

    def by(table: Collective) -> MeshTransport:
        return MeshTransport(engine, mesh, Always(table), lambda other: other)

    numel = numel_of(megabytes, world.size)
    whole, half = torch.rand(numel), torch.rand(numel, dtype=torch.float32).bfloat16()
    part, halves = torch.rand(numel // world.size), half.clone()

    def mean(transport: Any, tensor: Tensor) -> Callable[[], object]:
        return lambda: transport.answer(Mean(tensor, tensor))

    def summed(tensor: Tensor) -> Callable[[], object]:
        return lambda: (dist.all_reduce(tensor), tensor.div_(world.size))

    found = [Row(MEAN, ENGINE, summed(whole)), Row(MEAN, "auto", mean(automatic, whole))]
    found += [Row(MEAN, name, mean(by(table), whole)) for name, table in tables().items()]

    def together() -> None:
        for _ in range(2):  # who comes last to one gather leaves it first, by one way
            automatic.answer(Gather((torch.zeros(1),)))

    if small:
        return found, together
    more = [
        Row(HALF, ENGINE, summed(half)),
        Row(HALF, "direct", mean(automatic, halves)),
        Row(SCATTER, ENGINE, lambda: dist.reduce_scatter_tensor(part, whole)),
        Row(SCATTER, "direct", mean(by(Scattered()), whole)),
        Row(GATHER, ENGINE, lambda: dist.all_gather_into_tensor(whole, part)),
        Row(GATHER, "direct", lambda: automatic.answer(Gather((part,)))),
    ]
    return [*found, *more], together


def work(args: argparse.Namespace) -> None:
    """One worker's part; rank 0 prints the seconds of every row and round."""
    torch.set_num_threads(1)
    todo, together = rows(args.megabytes, args.small)
    taken: list[list[float]] = [[] for _ in todo]
    for round_ in range(args.rounds + 1):
        for row, seconds in zip(todo, taken, strict=True):
            for _ in range(WARM_UP * args.warm):
                row.act()
            together()
            began = time.perf_counter()
            row.act()
            slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if round_:  # the first one is for memory and windows
                seconds.append(float(slowest))
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps([[row.what, row.how, each] for row, each in zip(todo, taken, strict=True)]))
    dist.barrier()


def launch(workers: int, args: argparse.Namespace) -> list[tuple[str, str, list[float]]]:
    lab = ["--network", args.network] if args.network else []
    mine = ["--work", "--megabytes", str(args.megabytes), "--rounds", str(args.rounds), *["--small"] * args.small]
    mine += ["--warm"] * args.warm
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gossamer", "run", "--workers", str(workers), *lab, "--logs", folder]
        run = subprocess.run([*command, __file__, *mine], cwd=ROOT, capture_output=True, text=True)
    for line in run.stdout.splitlines():
        _, found, text = line.partition("RESULT ")
        if found:
            return [(what, how, seconds) for what, how, seconds in json.loads(text)]
    raise SystemExit(run.stdout[-2000:] + run.stderr[-2000:])


def foretold(how: str, workers: int, args: argparse.Namespace) -> str:
    """Seconds that the price says a mean in float32 takes by a table; nothing where there is no network."""
    if not args.network or how == ENGINE:
        return ""
    network, nbytes = read_network(args.network, workers), numel_of(args.megabytes, workers) * 4
    if how == "auto":
        table: Collective = fastest(nbytes, 4, network)
    else:
        table = tables()[how]
    seconds = table_seconds(table, nbytes, 4, network)
    return f"   foretold {1000 * seconds:9.2f} ms" + (f" ({table})" if how == "auto" else "")


def report(workers: int, found: list[tuple[str, str, list[float]]], args: argparse.Namespace) -> None:
    print(f"\n{workers} workers")
    engine = {what: seconds for what, how, seconds in found if how == ENGINE}
    for what, how, seconds in found:
        ratios = [theirs / ours for theirs, ours in zip(engine[what], seconds, strict=True)]
        low, *_, high = statistics.quantiles(ratios, n=10)
        middle = statistics.median(seconds)
        print(
            f"  {what:26} {how:14} {1000 * middle:9.2f} ms {args.megabytes / 1000 / middle:7.3f} GB/s   "
            f"{statistics.median(ratios):5.2f} x gloo ({low:.2f} to {high:.2f})"
            f"{foretold(how, workers, args) if what == MEAN else ''}"
        )


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Collectives beside Gloo's.")
    options.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    options.add_argument("--network", default="")
    options.add_argument("--megabytes", type=float, default=100.0)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--small", action="store_true", help="only means in float32")
    options.add_argument("--warm", action="store_true", help="use connections just before they are timed")
    options.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.work:
        work(given)
    else:
        machine = f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}"
        print(f"{machine}, load {os.getloadavg()[0]:.1f}")
        print(f"command: {shlex.join(['python', *sys.argv])}; network: {given.network or 'loopback'}")
        for count in given.workers:
            report(count, launch(count, given), given)
