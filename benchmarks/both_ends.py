"""Both ends of a wire: ways of talking over loopback, compared in turns by two processes that live through all rounds.

There is a connection for each way, so that nothing is set up between turns, and the ways take turns in each round, in
changing order, so that whatever else the machine does meets all of them. With --gigabits the kernel paces each
connection to so much.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from gossamer.base.ops import AllReduceMean, CollectiveOp
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.standalone import standalone_mesh
from gossamer.comm.mesh.transport import MeshTransport

PACING = getattr(socket, "SO_MAX_PACING_RATE", 47)  # of Linux, in bytes a second
NEAR = Links.alike(((0.0001,) * 2,) * 2, 1e9)
MOST = 2000  # operations in one turn

Operation = Callable[[torch.Tensor], CollectiveOp]
End = Callable[[int, list[socket.socket | None], str], MeshTransport]  # of (rank, connections by rank, way)
Taken = dict[tuple[str, int, str], list[tuple[float, float]]]


def mean(x: torch.Tensor) -> CollectiveOp:
    return AllReduceMean(x, x)


def plain_end(rank: int, connections: list[socket.socket | None], way: str) -> MeshTransport:
    return standalone_mesh(rank, connections, "direct", NEAR, gives_notice=False)


@dataclass(frozen=True)
class Turn:
    number: int  # of the round; round 0 warms up
    operation: str
    nbytes: int
    way: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    ways: Sequence[str]
    end: End
    operations: Mapping[str, Operation]

    def taken(self, args: argparse.Namespace) -> Taken | None:
        """By operation, bytes and way, of each round: seconds, and processor seconds of both ends, for one operation.
        None in the other process."""
        os.environ["GOSSAMER_SHARED_MEMORY"] = "0"
        torch.set_num_threads(1)
        if args.other is not None:
            connections = [socket.create_connection(("127.0.0.1", args.other)) for _ in self.ways]
            print(json.dumps(self._measured(1, connections, args)))
            return None
        with socket.create_server(("127.0.0.1", 0)) as listener:
            command = [sys.executable, *sys.argv, "--other", str(listener.getsockname()[1])]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
                assert other.stdout is not None
                mine = self._measured(0, [listener.accept()[0] for _ in self.ways], args)
                theirs = json.loads(other.stdout.readline())
        found: Taken = {}
        for turn, (wall, own), (_, others) in zip(self._turns(args), mine, theirs, strict=True):
            if turn.number:
                found.setdefault((turn.operation, turn.nbytes, turn.way), []).append((wall, own + others))
        return found

    def _turns(self, args: argparse.Namespace) -> Iterator[Turn]:
        """The same at both ends."""
        for number in range(args.rounds + 1):
            for operation in self.operations:
                for nbytes in args.sizes:
                    for place in range(len(self.ways)):
                        way = self.ways[(number + place) % len(self.ways)]
                        yield Turn(number, operation, nbytes, way, max(2, min(MOST, args.bytes // nbytes)))

    def _measured(
        self, rank: int, connections: Sequence[socket.socket], args: argparse.Namespace
    ) -> list[tuple[float, float]]:
        """Of each turn, seconds and this process's processor seconds for one operation."""
        ways = {}
        for way, connection in zip(self.ways, connections, strict=True):
            _prepare(connection, args.gigabits)
            ways[way] = self.end(rank, [None, connection] if rank == 0 else [connection, None], way)
        found = []
        for turn in self._turns(args):
            x = torch.ones(turn.nbytes // 4)
            wall, own = time.perf_counter(), time.process_time()
            for _ in range(turn.count):
                ways[turn.way].answer(self.operations[turn.operation](x))
            found.append(((time.perf_counter() - wall) / turn.count, (time.process_time() - own) / turn.count))
        return found


def _prepare(connection: socket.socket, gigabits: float) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if gigabits:
        connection.setsockopt(socket.SOL_SOCKET, PACING, int(gigabits * 1e9 / 8))
    connection.setblocking(False)


def pace(args: argparse.Namespace) -> str:
    """What a report says of rounds and pace."""
    paced = f"paced to {args.gigabits:g} gigabits a second" if args.gigabits else "not paced"
    return f"{args.rounds} rounds, loopback {paced}, no shared memory"


def options(description: str, sizes: list[int], nbytes: int) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--rounds", type=int, default=11)
    found.add_argument("--sizes", type=int, nargs="+", default=sizes)
    found.add_argument("--bytes", type=int, default=nbytes, help="of operations in one turn")
    found.add_argument("--gigabits", type=float, default=0.0, help="a second; 0: as fast as it goes")
    found.add_argument("--other", type=int, help=argparse.SUPPRESS)  # the port at which the first process listens
    return found
