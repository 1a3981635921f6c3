"""What staging costs a mesh: means and gathers between two processes over loopback, staged and straight, in turns.

Staged, a tensor goes to other memory chunk by chunk, travels from there, and comes back to where the answer belongs: as
one of a GPU does, but copied by this thread and not by a device beside it. So nothing here says what a GPU takes; the
ratio is what copying and cutting cost where no copy hides behind the wire. Two processes that live through all rounds,
with a connection for each way; the ways take turns in each round, in changing order. With --gigabits the kernel paces
each connection to so much.

    python benchmarks/staging.py [--rounds 11] [--sizes 64000000 4000000 4096] [--gigabits 1]
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import provenance  # found only after the line above

from gossamer.core.ops import AllGather, AllReduceMean, CollectiveOp
from gossamer.transports.mesh.link_measurement import Links
from gossamer.transports.mesh.staged_operations import StagedOperations
from gossamer.transports.mesh.standalone import standalone_mesh
from gossamer.transports.mesh.transport import MeshTransport

STRAIGHT, STAGED = WAYS = ("straight", "staged")
PACING = getattr(socket, "SO_MAX_PACING_RATE", 47)  # of Linux, in bytes a second
NEAR = Links.alike(((0.0001,) * 2,) * 2, 1e9)
OPS: dict[str, Callable[[torch.Tensor], CollectiveOp]] = {
    "mean": lambda x: AllReduceMean(x, x),
    "gather": lambda x: AllGather((x,)),
}

Turn = tuple[int, str, int, str, int]  # round, operation, bytes, way, and how many of them


def transport(rank: int, connection: socket.socket, way: str, gigabits: float) -> MeshTransport:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if gigabits:
        connection.setsockopt(socket.SOL_SOCKET, PACING, int(gigabits * 1e9 / 8))
    connection.setblocking(False)
    made = standalone_mesh(rank, [None, connection] if rank == 0 else [connection, None], "direct", NEAR, says=False)
    if way == STAGED:
        made._staged = StagedOperations(made._operations, everything=True)
    return made


def turns(args: argparse.Namespace) -> Iterator[Turn]:
    """The same at both ends. Round 0 warms up."""
    for number in range(args.rounds + 1):
        for op in OPS:
            for nbytes in args.sizes:
                for place in range(len(WAYS)):
                    way = WAYS[(number + place) % len(WAYS)]
                    yield number, op, nbytes, way, max(2, min(1000, args.bytes // nbytes))


def measure(rank: int, connections: dict[str, socket.socket], args: argparse.Namespace) -> list[list[float]]:
    """Of each turn, seconds and this process's processor seconds for one operation."""
    ways = {way: transport(rank, each, way, args.gigabits) for way, each in connections.items()}
    found = []
    for _, op, nbytes, way, count in turns(args):
        x = torch.ones(nbytes // 4)
        wall, own = time.perf_counter(), time.process_time()
        for _ in range(count):
            ways[way].answer(OPS[op](x))
        found.append([(time.perf_counter() - wall) / count, (time.process_time() - own) / count])
    return found


def report(mine: list[list[float]], theirs: list[list[float]], args: argparse.Namespace) -> None:
    print(f"{provenance()}\n")
    pace = f"paced to {args.gigabits:g} gigabits a second" if args.gigabits else "not paced"
    print(f"{args.rounds} rounds, loopback {pace}, no shared memory; a copy is this thread's memcpy, no GPU\n")
    print(
        "| operation | bytes | way | GB/s | least to most | of straight | least to most | processor s/GB of both ends |"
    )
    print("|---|---:|---|---:|---:|---:|---:|---:|")
    taken: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    for (number, op, nbytes, way, _), (wall, own), (_, other) in zip(turns(args), mine, theirs, strict=True):
        if number:
            taken.setdefault((op, nbytes, way), []).append((wall, own + other))
    for (op, nbytes, way), rounds in sorted(taken.items(), key=lambda each: (each[0][0], -each[0][1], each[0][2])):
        rates = [nbytes / wall / 1e9 for wall, _ in rounds]
        straight = taken[op, nbytes, STRAIGHT]
        ratios = [other / wall for (wall, _), (other, _) in zip(rounds, straight, strict=True)]
        work = statistics.median(own for _, own in rounds) / nbytes * 1e9
        print(
            f"| {op} | {nbytes} | {way} | {statistics.median(rates):.4g} | {min(rates):.4g} to {max(rates):.4g} | "
            f"{statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} | {work:.2f} |"
        )


def main(args: argparse.Namespace) -> None:
    os.environ["GOSSAMER_SHARED_MEMORY"] = "0"
    torch.set_num_threads(1)
    if args.other:
        port = json.loads(sys.stdin.readline())
        connections = {way: socket.create_connection(("127.0.0.1", port)) for way in WAYS}
        print(json.dumps(measure(1, connections, args)))
        return
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        subprocess.Popen(
            [sys.executable, *sys.argv, "--other"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other,
    ):
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(json.dumps(listener.getsockname()[1]) + "\n")
        other.stdin.flush()
        connections = {way: listener.accept()[0] for way in WAYS}
        mine = measure(0, connections, args)
        report(mine, json.loads(other.stdout.readline()), args)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="What staging costs a mesh.")
    options.add_argument("--rounds", type=int, default=11)
    options.add_argument("--sizes", type=int, nargs="+", default=[64_000_000, 4_000_000, 4096])
    options.add_argument("--bytes", type=int, default=130_000_000, help="of operations in one turn")
    options.add_argument("--gigabits", type=float, default=0.0, help="a second; 0: as fast as it goes")
    options.add_argument("--other", action="store_true", help=argparse.SUPPRESS)
    main(options.parse_args())
