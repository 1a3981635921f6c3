"""What staging costs a mesh: means and gathers between two processes over loopback, staged and straight, in turns.

Staged, a tensor goes to other memory chunk by chunk, travels from there, and comes back to where the answer belongs: as
one of a GPU does, but copied by this thread and not by a device beside it. So nothing here says what a GPU takes; the
ratio is what copying and cutting cost where no copy hides behind the wire.

    python benchmarks/staging.py [--rounds 11] [--sizes 64000000 4000000 4096] [--gigabits 1]
"""

import argparse
import socket
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.both_ends import Comparison, Taken, mean, options, pace, plain_end  # found only after the line above
from benchmarks.provenance import provenance

from gossamer.base.ops import AllGather
from gossamer.comm.mesh.staged_operations import StagedOperations
from gossamer.comm.mesh.transport import MeshTransport

STRAIGHT, STAGED = WAYS = ("straight", "staged")


def end(rank: int, connections: list[socket.socket | None], way: str) -> MeshTransport:
    made = plain_end(rank, connections, way)
    if way == STAGED:
        made._staged = StagedOperations(made._operations, everything=True)
    return made


def report(taken: Taken, args: argparse.Namespace) -> None:
    print(f"{provenance()}\n")
    print(f"{pace(args)}; a copy is this thread's memcpy, no GPU\n")
    print(
        "| operation | bytes | way | GB/s | least to most | of straight | least to most | processor s/GB of both ends |"
    )
    print("|---|---:|---|---:|---:|---:|---:|---:|")
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
    operations = {"mean": mean, "gather": lambda x: AllGather((x,))}
    taken = Comparison(ways=WAYS, end=end, operations=operations).taken(args)
    if taken is not None:
        report(taken, args)


if __name__ == "__main__":
    main(options("What staging costs a mesh.", [64_000_000, 4_000_000, 4096], 130_000_000).parse_args())
