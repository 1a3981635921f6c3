"""What the MAC of every frame costs a server: pushes and pulls with it, and with checksums alone, in turns.

A server in a process of its own adds what is pushed to its parameters and answers pulls with them; so little work is
the most that a MAC can weigh. Both ways live through all rounds on connections of their own, and take turns within
each, in changing order. Checksums alone exist in this program only: its endpoints replace the MAC of one run's frames.

    python benchmarks/frame_authentication.py [--rounds 15] [--sizes 100000000 1000000 4096]
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
import zlib
from contextlib import ExitStack
from typing import Any

import torch

from gossamer.base.peer_ops import (
    SERVER,
    WORKER,
    Arrived,
    Ask,
    Await,
    Peer,
    PeerScript,
    Pull,
    Pulled,
    Push,
    Receipt,
    Reply,
    Stamp,
)
from gossamer.comm.environment.host_info import machine
from gossamer.comm.handshake import Handshake
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc_protocol import credentials
from gossamer.comm.rpc_protocol.credentials import Credentials
from gossamer.comm.rpc_protocol.frame_mac import TAG_BYTES, FrameMac, FrameTags
from gossamer.comm.rpc_protocol.messages import HelloRecord

SECONDS = 0.4  # of one way in one round
WAYS = ("checksums", "MAC")  # a run each
HERE, THERE = Peer(WORKER, 0), Peer(SERVER, 0)


# -- checksums alone, as tags -------------------------------------------------------------------------------


class NoHash:
    """Beside a payload's CRC-32, which is there in any case."""

    def update(self, data: memoryview, /) -> None: ...

    def digest(self) -> bytes:
        return b""


class Checksums:
    """As hashlib's running hashes."""

    def __init__(self, checksum: int = 0) -> None:
        self.checksum = checksum

    def update(self, data: Any) -> None:
        self.checksum = zlib.crc32(data, self.checksum)

    def digest(self) -> bytes:
        return self.checksum.to_bytes(TAG_BYTES, "little")


class WithoutMac(FrameMac):
    def __init__(self) -> None:
        super().__init__(b"", payload_hash=NoHash)

    def begin(self) -> FrameTags:
        return FrameTags(Checksums())  # type: ignore[arg-type]


_keyed = credentials._frame_mac


def _of_its_run(handshake: Handshake, side: bytes, hello: HelloRecord) -> FrameMac:
    return WithoutMac() if hello.run == "checksums" else _keyed(handshake, side, hello)


credentials._frame_mac = _of_its_run


def endpoint(me: Peer, way: str, largest: int) -> TcpEndpoint:
    return TcpEndpoint(Credentials(me=me, token=bytes(range(32)), run=way, largest_frame_bytes=largest + 2**16))


# -- the server's process -----------------------------------------------------------------------------------


def adding(parameters: dict[str, torch.Tensor]) -> PeerScript:
    while True:
        match (yield Await()):
            case Arrived(token=token, op=Push(key=key, payload=(gradient,))):
                held = parameters.setdefault(key, torch.zeros_like(gradient))
                held.add_(gradient, alpha=-0.01)
                yield Reply(token=token, answer=Receipt(version=0))
            case Arrived(token=token, op=Pull(key=key)):
                yield Reply(token=token, answer=Pulled(version=0, payload=(parameters[key].clone(),)))


def serve(largest: int) -> None:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        servers = {way: stack.enter_context(endpoint(THERE, way, largest)) for way in WAYS}
        for each in servers.values():
            each.start(adding({}))
        print(json.dumps({way: each.address for way, each in servers.items()}), flush=True)
        sys.stdin.read()


# -- the worker's -------------------------------------------------------------------------------------------


def measure(workers: dict[str, TcpEndpoint], sizes: list[int], rounds: int) -> dict[tuple[int, str], list[float]]:
    """Ratios and seconds of one push or pull, by size, op and way. The first round warms up and is not kept."""
    found: dict[tuple[int, str], list[float]] = {}
    for nbytes in sizes:
        gradient, key = torch.full((nbytes // 4,), 0.5), str(nbytes)
        ops: dict[str, Ask] = {
            "push": Push(to=THERE, key=key, stamp=Stamp(0, 0), payload=(gradient,)),
            "pull": Pull(of=THERE, key=key),
        }
        for name, op in ops.items():
            count = 3
            for number in range(rounds + 1):
                for way in WAYS[:: 1 if number % 2 else -1]:
                    start = time.perf_counter()
                    for _ in range(count):
                        workers[way].answer(op)
                    seconds = (time.perf_counter() - start) / count
                    if number:
                        found.setdefault((nbytes, f"{name}, {way}"), []).append(seconds)
                count = max(3, int(SECONDS / seconds))
    return found


def report(found: dict[tuple[int, str], list[float]]) -> None:
    print(f"{json.dumps(machine())}, torch threads 1\ncommand: {shlex.join(['python', *sys.argv])}\n")
    print("| bytes | op | checksums | MAC | GB/s with MAC | MAC / checksums, median | least to most |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for nbytes, op in dict.fromkeys((nbytes, name.split(",")[0]) for nbytes, name in found):
        without, with_mac = (found[nbytes, f"{op}, {way}"] for way in WAYS)
        ratios = [mine / other for mine, other in zip(with_mac, without, strict=True)]
        middle = statistics.median(with_mac)
        print(
            f"| {nbytes} | {op} | {1000 * statistics.median(without):.3f} ms | {1000 * middle:.3f} ms | "
            f"{nbytes / middle / 1e9:.2f} | {statistics.median(ratios):.3f} | {min(ratios):.3f} to {max(ratios):.3f} |"
        )


def compare(sizes: list[int], rounds: int) -> None:
    command = [sys.executable, __file__, "--serve", str(max(sizes))]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server,
        ExitStack() as s,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        s.callback(server.stdin.close)
        workers = {way: s.enter_context(endpoint(HERE, way, max(sizes))) for way in WAYS}
        for way, address in json.loads(server.stdout.readline()).items():
            workers[way].meet({THERE: tuple(address)})
        report(measure(workers, sizes, rounds))


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if args.serve:
        serve(args.serve)
    else:
        compare(args.sizes, args.rounds)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="What the MAC of every frame costs a server.")
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--sizes", type=int, nargs="+", default=[100_000_000, 1_000_000, 4096])
    options.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    main(options.parse_args())
