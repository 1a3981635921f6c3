"""What encryption costs lock-step traffic: means between two processes over loopback, sealed and not, in turns.

Each end seals what it sends and opens what it hears. Processor seconds are those of both processes, for a gigabyte that
went each way.

    python benchmarks/sealing.py [--rounds 11] [--sizes 100000000 1000000 4096] [--gigabits 1]
"""

import argparse
import socket
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.both_ends import NEAR, Comparison, Taken, mean, options, pace  # found only after the line above
from benchmarks.provenance import provenance

from gossamer.comm.libcrypto import AES, CHACHA, KEY_BYTES
from gossamer.comm.mesh.sealing import LinkKeys
from gossamer.comm.mesh.standalone import standalone_mesh
from gossamer.comm.mesh.transport import MeshTransport

PLAIN = "plain"
WAYS = (PLAIN, AES, CHACHA)
KEYS = [bytes([rank]) * KEY_BYTES for rank in range(2)]  # nobody keeps anything secret here


def end(rank: int, connections: list[socket.socket | None], way: str) -> MeshTransport:
    keys = None if way == PLAIN else {1 - rank: LinkKeys(way, KEYS[rank], KEYS[1 - rank])}
    return standalone_mesh(rank, connections, "direct", NEAR, gives_notice=False, keys=keys)


def report(taken: Taken, args: argparse.Namespace) -> None:
    print(f"{provenance()}\n")
    print(f"{pace(args)}\n")
    print("| bytes | way | a mean | least to most | over plain | least to most | processor s/GB of both ends |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for (_, nbytes, way), rounds in sorted(taken.items(), key=lambda each: (-each[0][1], WAYS.index(each[0][2]))):
        walls = [wall for wall, _ in rounds]
        ratios = [wall / plain for wall, (plain, _) in zip(walls, taken["mean", nbytes, PLAIN], strict=True)]
        work = statistics.median(own for _, own in rounds) / nbytes * 1e9
        print(
            f"| {nbytes} | {way} | {1000 * statistics.median(walls):.3f} ms | "
            f"{1000 * min(walls):.3f} to {1000 * max(walls):.3f} ms | {statistics.median(ratios):.2f} | "
            f"{min(ratios):.2f} to {max(ratios):.2f} | {work:.2f} |"
        )


def main(args: argparse.Namespace) -> None:
    taken = Comparison(ways=WAYS, end=end, operations={"mean": mean}).taken(args)
    if taken is not None:
        report(taken, args)


if __name__ == "__main__":
    description = "What encryption costs lock-step traffic."
    main(options(description, [100_000_000, 1_000_000, 4096], 200_000_000).parse_args())
