"""What encryption costs lock-step traffic: means between two processes over loopback, sealed and not, in turns.

Two processes that live through all rounds, with a connection for each way of talking; the ways take turns in each
round, in changing order, so that whatever else the machine does meets all of them. Each end seals what it sends and
opens what it hears. Processor seconds are those of both processes, for a gigabyte that went each way. With --gigabits
the kernel paces each connection to so much.

    python benchmarks/sealing.py [--rounds 11] [--sizes 100000000 1000000 4096] [--gigabits 1]
"""

import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import provenance  # found only after the line above

from gossamer.core.ops import AllReduceMean
from gossamer.transports.mesh.link_measurement import Links
from gossamer.transports.mesh.sealing import AES, CHACHA, KEY_BYTES, LinkKeys
from gossamer.transports.mesh.standalone import standalone_mesh
from gossamer.transports.mesh.transport import MeshTransport

PLAIN = "plain"
WAYS = (PLAIN, AES, CHACHA)
PACING = getattr(socket, "SO_MAX_PACING_RATE", 47)  # of Linux, in bytes a second
NEAR = Links.alike(((0.0001,) * 2,) * 2, 1e9)


Connections = dict[str, socket.socket]  # by way


def transport(rank: int, connection: socket.socket, way: str, keys: list[bytes], gigabits: float) -> MeshTransport:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if gigabits:
        connection.setsockopt(socket.SOL_SOCKET, PACING, int(gigabits * 1e9 / 8))
    connection.setblocking(False)
    ends = [None, connection] if rank == 0 else [connection, None]
    sealed = None if way == PLAIN else {1 - rank: LinkKeys(way, keys[rank], keys[1 - rank])}
    return standalone_mesh(rank, ends, "direct", NEAR, says=False, keys=sealed)


def turns(args: argparse.Namespace) -> Iterator[tuple[int, int, str, int]]:
    """Round, bytes, way and how many means: the same at both ends. Round 0 warms up."""
    for number in range(args.rounds + 1):
        for nbytes in args.sizes:
            for place in range(len(WAYS)):
                way = WAYS[(number + place) % len(WAYS)]
                yield number, nbytes, way, max(2, min(2000, args.bytes // nbytes))


def measure(rank: int, connections: Connections, keys: list[bytes], args: argparse.Namespace) -> list[list[float]]:
    """Of each turn, seconds and this process's processor seconds for one mean."""
    ways = {way: transport(rank, each, way, keys, args.gigabits) for way, each in connections.items()}
    found = []
    for _, nbytes, way, count in turns(args):
        x = torch.ones(nbytes // 4)
        wall, own = time.perf_counter(), time.process_time()
        for _ in range(count):
            ways[way].answer(AllReduceMean(x, x))
        found.append([(time.perf_counter() - wall) / count, (time.process_time() - own) / count])
    return found


def report(mine: list[list[float]], theirs: list[list[float]], args: argparse.Namespace) -> None:
    print(f"{provenance()}\n")
    pace = f"paced to {args.gigabits:g} gigabits a second" if args.gigabits else "not paced"
    print(f"{args.rounds} rounds, loopback {pace}, no shared memory\n")
    print("| bytes | way | a mean | least to most | over plain | least to most | processor s/GB of both ends |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    taken: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for (number, nbytes, way, _), (wall, own), (_, other) in zip(turns(args), mine, theirs, strict=True):
        if number:
            taken.setdefault((nbytes, way), []).append((wall, own + other))
    for (nbytes, way), rounds in sorted(taken.items(), key=lambda each: (-each[0][0], WAYS.index(each[0][1]))):
        walls = [wall for wall, _ in rounds]
        ratios = [wall / plain for wall, (plain, _) in zip(walls, taken[nbytes, PLAIN], strict=True)]
        work = statistics.median(own for _, own in rounds) / nbytes * 1e9
        print(
            f"| {nbytes} | {way} | {1000 * statistics.median(walls):.3f} ms | "
            f"{1000 * min(walls):.3f} to {1000 * max(walls):.3f} ms | {statistics.median(ratios):.2f} | "
            f"{min(ratios):.2f} to {max(ratios):.2f} | {work:.2f} |"
        )


def main(args: argparse.Namespace) -> None:
    os.environ["GOSSAMER_SHARED_MEMORY"] = "0"
    torch.set_num_threads(1)
    if args.other:
        port, *texts = json.loads(sys.stdin.readline())
        keys = [bytes.fromhex(text) for text in texts]
        connections = {way: socket.create_connection(("127.0.0.1", port)) for way in WAYS}
        print(json.dumps(measure(1, connections, keys, args)))
        return
    keys = [secrets.token_bytes(KEY_BYTES) for _ in range(2)]
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        subprocess.Popen(
            [sys.executable, *sys.argv, "--other"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as other,
    ):
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(json.dumps([listener.getsockname()[1], *(key.hex() for key in keys)]) + "\n")
        other.stdin.flush()
        connections = {way: listener.accept()[0] for way in WAYS}
        mine = measure(0, connections, keys, args)
        report(mine, json.loads(other.stdout.readline()), args)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="What encryption costs lock-step traffic.")
    options.add_argument("--rounds", type=int, default=11)
    options.add_argument("--sizes", type=int, nargs="+", default=[100_000_000, 1_000_000, 4096])
    options.add_argument("--bytes", type=int, default=200_000_000, help="of means in one turn")
    options.add_argument("--gigabits", type=float, default=0.0, help="a second; 0: as fast as it goes")
    options.add_argument("--other", action="store_true", help=argparse.SUPPRESS)
    main(options.parse_args())
