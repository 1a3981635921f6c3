"""Collectives: all-reduce, reduce-scatter and all-gather by Gossamer, beside Gloo's own, in one interleaved run.

Every round times every row once, from a moment at which all are there; a row's time is that of its slowest worker.
Medians over rounds, and the ratio to Gloo of the same round; on a network also what was estimated. Started by itself it
starts its workers: on this machine's loopback, or each on a host of its own on an emulated network.

    python benchmarks/collectives.py [--workers 2 4] [--network SPEC] [--megabytes 100] [--rounds 9] [--small]
                                     [--warm | --rest SECONDS] [--most-seconds 240]

Connections forget in silence how fast they were, and on long paths that decides. --warm: every row uses its connections
just before it is timed; --rest: before that all are silent for so long, as they are while a model computes. Rows that
would take too long, as estimated, are left out, and so are rounds.
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
from gossamer import events
from gossamer.algorithms.collectives import COLLECTIVES, Collective, DirectAllReduce, Hop
from gossamer.base.ops import AllGather, AllReduceMean
from gossamer.comm.environment.run_settings import own_address
from gossamer.comm.mesh.collective_selector import CollectiveSelector
from gossamer.comm.mesh.connect import connect
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.native_mesh import Mesh
from gossamer.comm.mesh.operations import MeshOperations
from gossamer.comm.mesh.shared_memory import share
from gossamer.comm.mesh.transport import EngineFallback, MeshTransport, mesh_transport
from gossamer.comm.network import read_network
from gossamer.comm.network.cost.cheapest_collective import rested_seconds, table_seconds
from gossamer.comm.network.cost.message_schedule import Moves
from gossamer.comm.network.cost.op_cost import ENGINE as BY_ENGINE
from gossamer.comm.network.tcp_model import ETHERNET
from gossamer.comm.process_group import ProcessGroupTransport

ROOT = Path(__file__).resolve().parent.parent
ENGINE = "gloo"
ITEMSIZE = 4
WARM_UP = 2  # uses, after which windows have grown to what the path holds
KINDS = 3  # of rows: means in float32, in half precision, and sums in parts with gathers take about as long
LEAST_ROUNDS, LEAST_MEGABYTES = 3, 0.1
MEAN, HALF, SCATTER, GATHER = "mean, float32", "mean, bfloat16", "reduce-scatter, float32", "all-gather, float32"


@dataclass(frozen=True)
class Row:
    """One collective by one engine. act: does it once, on tensors that exist already."""

    what: str
    how: str
    act: Callable[[], object]


class Scattered(DirectAllReduce):
    """The first half of a direct mean: every part is summed by its owner."""

    def _hops(self, rank: int, world: int) -> Iterator[Hop]:
        return (hop for hop in super()._hops(rank, world) if hop.round == 0)


def tables() -> dict[str, Collective]:
    return {name: made(per_node=2) if name == "hierarchical" else made() for name, made in COLLECTIVES.items()}


def numel_of(megabytes: float, world: int) -> int:
    return int(megabytes * 1e6) // 4 // world * world


def rows(megabytes: float, small: bool) -> tuple[list[Row], Callable[[], None], dict[str, Any]]:
    """What to time, what brings all workers to the same moment, and what was found out of the links."""
    world = gossamer.init()
    engine = ProcessGroupTransport()
    engine.all_gather_text("")  # what the engine itself takes to begin is no matter of links
    began = time.perf_counter()
    automatic = mesh_transport(engine, own_address())
    known = {"seconds": time.perf_counter() - began, "links": automatic.links}
    sockets = connect(world.rank, world.size, own_address(), engine.all_gather_text)
    mesh = Mesh(world.rank, sockets, shared=share(world.rank, sockets, engine.all_gather_text))
    links = Links.of(automatic.links)

    def by(wish: Collective | str) -> MeshTransport:
        """Over the same connections, so that all rows find them in the same state."""
        fallback = EngineFallback(engine, lambda other, known: other)
        return MeshTransport(MeshOperations(mesh, CollectiveSelector(wish, links)), fallback)

    numel = numel_of(megabytes, world.size)
    whole, half = torch.rand(numel), torch.rand(numel, dtype=torch.float32).bfloat16()
    part, halves = torch.rand(numel // world.size), half.clone()

    def mean(transport: Any, tensor: Tensor) -> Callable[[], object]:
        return lambda: transport.answer(AllReduceMean(tensor, tensor))

    def summed(tensor: Tensor) -> Callable[[], object]:
        return lambda: (dist.all_reduce(tensor), tensor.div_(world.size))

    found = [Row(MEAN, ENGINE, summed(whole)), Row(MEAN, "auto", mean(by("auto"), whole))]
    found += [Row(MEAN, name, mean(by(table), whole)) for name, table in tables().items()]

    def together() -> None:
        for _ in range(2):  # who comes last to one gather leaves it first, by one way
            automatic.answer(AllGather((torch.zeros(1),)))

    if small:
        return found, together, known
    more = [
        Row(HALF, ENGINE, summed(half)),
        Row(HALF, "direct", mean(by("auto"), halves)),
        Row(SCATTER, ENGINE, lambda: dist.reduce_scatter_tensor(part, whole)),
        Row(SCATTER, "direct", mean(by(Scattered()), whole)),
        Row(GATHER, ENGINE, lambda: dist.all_gather_into_tensor(whole, part)),
        Row(GATHER, "direct", lambda: automatic.answer(AllGather((part,)))),
    ]
    return [*found, *more], together, known


def work(args: argparse.Namespace) -> None:
    """One worker's part; rank 0 prints the seconds of every row and round."""
    torch.set_num_threads(1)
    picked: dict[int, str] = {}
    events.subscribe(lambda event: note(event, picked))
    todo, together, known = rows(args.megabytes, args.small)
    taken: list[list[float]] = [[] for _ in todo]
    for round_ in range(args.rounds + 1):
        for row, seconds in zip(todo, taken, strict=True):
            for _ in range(uses(args) - 1):
                row.act()
            time.sleep(args.rest)
            together()
            began = time.perf_counter()
            row.act()
            slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if round_:  # the first one is for memory and windows
                seconds.append(float(slowest))
    if dist.get_rank() == 0:
        known["auto"] = picked.get(numel_of(args.megabytes, dist.get_world_size()) * ITEMSIZE, "")
        known["rows"] = [[row.what, row.how, each] for row, each in zip(todo, taken, strict=True)]
        print("RESULT " + json.dumps(known))
    dist.barrier()


def note(event: events.Event, picked: dict[int, str]) -> None:
    if isinstance(event, events.CollectivePicked):
        picked.setdefault(event.nbytes, event.collective)


def uses(args: argparse.Namespace) -> int:
    """How often a row does what it does, each time that it is timed."""
    return 1 + (WARM_UP if args.warm else 1 if args.rest else 0)


def launch(workers: int, args: argparse.Namespace) -> dict[str, Any]:
    lab = ["--network", args.network] if args.network else []
    mine = ["--work", "--megabytes", str(args.megabytes), "--rounds", str(args.rounds), *["--small"] * args.small]
    mine += ["--rest", str(args.rest), *["--warm"] * args.warm]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gossamer", "run", "--workers", str(workers), *lab, "--logs", folder]
        run = subprocess.run([*command, __file__, *mine], cwd=ROOT, capture_output=True, text=True)
    for line in run.stdout.splitlines():
        _, found, text = line.partition("RESULT ")
        if found:
            result: dict[str, Any] = json.loads(text)
            return result
    raise SystemExit(run.stdout[-2000:] + run.stderr[-2000:])


# -- what is estimated


def estimated(workers: int, args: argparse.Namespace) -> dict[str, float]:
    """Seconds that the price says a mean in float32 takes by each table; nothing where there is no network."""
    if not args.network:
        return {}
    network, nbytes = read_network(args.network, workers), numel_of(args.megabytes, workers) * ITEMSIZE
    found = {
        name: table_seconds(table, nbytes, ITEMSIZE, network, rest_seconds=args.rest)
        for name, table in tables().items()
    }

    def engine() -> list[list[Moves]]:
        return [BY_ENGINE.mean(rank, workers, nbytes // ITEMSIZE, ITEMSIZE) for rank in range(workers)]

    return found | {ENGINE: rested_seconds(engine, network, rest_seconds=args.rest)}


def least_seconds(workers: int, args: argparse.Namespace) -> float:
    """Seconds that the slowest host's link takes for the payload of a mean alone: 2 (n-1)/n N; 0 without a network."""
    if not args.network:
        return 0.0
    hosts = read_network(args.network, workers).hosts
    slowest = min(min(host.up_bits_per_second, host.down_bits_per_second) for host in hosts)
    return 2 * (workers - 1) / workers * numel_of(args.megabytes, workers) * ITEMSIZE * 8 / slowest


def fitted(workers: int, args: argparse.Namespace) -> argparse.Namespace:
    """The same with so few rounds, and so few bytes, that all is done in time, as far as that can be estimated."""
    rounds, megabytes = args.rounds, args.megabytes
    while True:
        fit = argparse.Namespace(**vars(args) | {"rounds": rounds, "megabytes": megabytes})
        each = estimated(workers, fit).values()
        kinds = 1 if args.small else KINDS
        seconds = (rounds + 1) * kinds * (uses(args) * sum(each) + len(each) * args.rest)
        if seconds <= args.most_seconds or megabytes < LEAST_MEGABYTES:
            return fit
        rounds, megabytes = (rounds - 1, megabytes) if rounds > LEAST_ROUNDS else (rounds, megabytes / 2)


# -- what is printed


def report(workers: int, result: dict[str, Any], args: argparse.Namespace) -> None:
    prices = estimated(workers, args)
    print(f"\n{workers} workers, {args.megabytes:g} MB, {args.rounds} rounds")
    lines = Links.of(result["links"])
    print(f"  connected and measured in {1000 * result['seconds']:.0f} ms: {about(lines)}")
    engine = {what: seconds for what, how, seconds in result["rows"] if how == ENGINE}
    for what, how, seconds in result["rows"]:
        ratios = [theirs / ours for theirs, ours in zip(engine[what], seconds, strict=True)]
        low, *_, high = statistics.quantiles(ratios, n=10)
        middle = statistics.median(seconds)
        price = f"   estimated {1000 * prices[how]:9.2f} ms" if what == MEAN and how in prices else ""
        name = f"   {result['auto']}" if how == "auto" else ""
        if what == MEAN and (least := least_seconds(workers, args)):
            name += f"   {least / middle:.1%} of the link"
        print(
            f"  {what:26} {how:14} {1000 * middle:9.2f} ms {args.megabytes / 1000 / middle:7.3f} GB/s   "
            f"{statistics.median(ratios):5.2f} x gloo ({low:.2f} to {high:.2f}){price}{name}"
        )
    middles = {how: statistics.median(seconds) for what, how, seconds in result["rows"] if what == MEAN}
    best = min(tables(), key=lambda how: middles[how])
    if least_seconds(workers, args):
        most, acknowledged = ETHERNET.segment_bytes / ETHERNET.mtu_bytes, 1e9 / ETHERNET.wire_bytes(1e9)
        print(f"  headers leave {most:.1%} of the link, with an acknowledgment per two segments {acknowledged:.1%}")
    print(f"  auto takes {middles['auto'] / middles[best]:.2f} of the best table's time ({best})")


def about(links: Links) -> str:
    """In words, what every worker's lines were found to carry."""
    up, down = ("/".join(f"{rate / 1e6:g}" for rate in rates) for rates in (links.up, links.down))
    network = links.network
    paths = [network.default, *network.paths.values()] if network.is_uniform else network.paths.values()
    trips = ", ".join(f"{1000 * path.round_trip_seconds:.2g} ms, loss {path.loss:.2g}" for path in paths)
    return f"up {up}, down {down} Mbit/s; {trips or f'{1000 * network.default.round_trip_seconds:.2g} ms'}"


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Collectives beside Gloo's.")
    options.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    options.add_argument("--network", default="")
    options.add_argument("--megabytes", type=float, default=100.0)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--small", action="store_true", help="only means in float32")
    options.add_argument("--warm", action="store_true", help="use connections just before they are timed")
    options.add_argument("--rest", type=float, default=0.0, help="seconds of silence before every single use")
    options.add_argument("--most-seconds", type=float, default=240.0, help="of sending, per number of workers")
    options.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.work:
        work(given)
    else:
        machine = f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}"
        print(f"{machine}, load {os.getloadavg()[0]:.1f}")
        print(f"command: {shlex.join(['python', *sys.argv])}; network: {given.network or 'loopback'}")
        for count in given.workers:
            fit = fitted(count, given)
            report(count, launch(count, fit), fit)
