"""Transport throughput between two processes on one machine: TcpEndpoint beside Gloo's send and ZeroMQ's sockets.

Two processes that live through all rounds; the ways take turns in each, so that whatever else the machine does meets
all of them. A message is acknowledged before the next is sent. The receiver gets a tensor that it may keep; ZeroMQ's
is a view of the message, Gloo receives into memory that it has used before.

    python benchmarks/transport.py [--rounds 7] [--sizes 100000000 1000000 4096]
    python benchmarks/transport.py --fuzz 100000
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gossamer.base.peer_ops import SERVER, WORKER, Arrived, Await, Peer, PeerScript, Push, Receipt, Reply, Stamp
from gossamer.comm.environment.host_info import machine
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc_protocol.credentials import Credentials

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 2**28
SECONDS = 0.4  # of one way in one round

Send = Callable[[torch.Tensor], None]


def endpoint(rank: int) -> TcpEndpoint:
    me = Peer(WORKER if rank else SERVER, 0)
    return TcpEndpoint(Credentials(me=me, token=bytes(32), run="benchmark", largest_frame_bytes=LARGEST))


def acknowledge() -> PeerScript:
    while True:
        heard = yield Await()
        if isinstance(heard, Arrived):
            token = heard.token
            del heard  # its memory may serve the next one
            yield Reply(token=token, answer=Receipt(version=0))


# -- the receiving process -------------------------------------------------------------------------------


def receive(folder: Path) -> None:
    """Serve all ways: Gossamer's and ZeroMQ's from threads, Gloo's as the sender commands."""
    import zmq

    context = zmq.Context()
    bell = context.socket(zmq.PAIR)
    port = bell.bind_to_random_port("tcp://127.0.0.1")
    with endpoint(0) as mine:
        mine.start(acknowledge())
        (folder / "address").write_text(json.dumps({"gossamer": mine.address, "zmq": port}))
        dist.init_process_group("gloo", f"file://{folder}/gloo", rank=0, world_size=2, timeout=timedelta(seconds=60))
        taken = torch.empty(LARGEST, dtype=torch.uint8)
        done = torch.zeros(1)
        for line in sys.stdin:
            command = json.loads(line)
            print("ready", flush=True)
            for _ in range(command["count"]):
                if command["way"] == "gloo":
                    dist.recv(taken[: command["nbytes"]], src=1)
                    dist.send(done, dst=1)
                elif command["way"] == "zmq":
                    frame = bell.recv(copy=False)
                    assert np.frombuffer(frame.buffer, dtype=np.uint8).size == command["nbytes"]
                    bell.send(b"")
        dist.destroy_process_group()
    bell.close()
    context.term()


# -- the sending process -------------------------------------------------------------------------------


@contextmanager
def gossamer_way(address: tuple[str, int]) -> Iterator[Send]:
    with endpoint(1) as mine:
        server = Peer(SERVER, 0)
        mine.meet({server: address})

        def send(x: torch.Tensor) -> None:
            mine.answer(Push(to=server, key="", stamp=Stamp(0, 0), payload=(x,)))

        yield send


@contextmanager
def zmq_way(port: int) -> Iterator[Send]:
    import zmq

    context = zmq.Context()
    bell = context.socket(zmq.PAIR)
    bell.connect(f"tcp://127.0.0.1:{port}")

    def send(x: torch.Tensor) -> None:
        bell.send(x.numpy().data, copy=False)
        bell.recv()

    yield send
    bell.close()
    context.term()


@contextmanager
def gloo_way(folder: Path) -> Iterator[Send]:
    dist.init_process_group("gloo", f"file://{folder}/gloo", rank=1, world_size=2, timeout=timedelta(seconds=60))
    done = torch.zeros(1)

    def send(x: torch.Tensor) -> None:
        dist.send(x, dst=0)
        dist.recv(done, src=0)

    yield send
    dist.destroy_process_group()


def measure(
    ways: dict[str, Send], say: Callable[[Any], None], args: argparse.Namespace
) -> dict[int, dict[str, list[float]]]:
    """Seconds of one message, by size, way and round; the first round warms up and is not kept."""
    found: dict[int, dict[str, list[float]]] = {}
    for nbytes in args.sizes:
        x = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
        counts = dict.fromkeys(ways, 3)
        found[nbytes] = {way: [] for way in ways}
        for number in range(args.rounds + 1):
            for way, send in ways.items():
                say({"way": way, "count": counts[way], "nbytes": nbytes})
                start = time.perf_counter()
                for _ in range(counts[way]):
                    send(x)
                seconds = (time.perf_counter() - start) / counts[way]
                counts[way] = max(3, int(SECONDS / seconds))
                if number:
                    found[nbytes][way].append(seconds)
    return found


def report(found: dict[int, dict[str, list[float]]]) -> None:
    print(f"{json.dumps(machine())}, torch threads 1\ncommand: {shlex.join(['python', *sys.argv])}\n")
    print("| bytes | way | a message | GB/s | least to most | of gloo's speed |\n|---:|---|---:|---:|---:|---:|")
    for nbytes, ways in found.items():
        for way, taken in ways.items():
            middle = statistics.median(taken)
            against = statistics.median(gloo / mine for gloo, mine in zip(ways["gloo"], taken, strict=True))
            print(
                f"| {nbytes} | {way} | {1000 * middle:.3f} ms | {nbytes / middle / 1e9:.2f} | "
                f"{1000 * min(taken):.3f} to {1000 * max(taken):.3f} ms | {against:.2f} |"
            )


def compare(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        command = [sys.executable, __file__, "--receive", name]
        receiver = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        assert receiver.stdin is not None
        assert receiver.stdout is not None
        stack.callback(receiver.stdin.close)
        while not (folder / "address").exists() or not (folder / "address").read_text():
            time.sleep(0.01)
        address = json.loads((folder / "address").read_text())

        commands, answers = receiver.stdin, receiver.stdout

        def say(command: Any) -> None:
            commands.write(json.dumps(command) + "\n")
            commands.flush()
            answers.readline()

        ways: dict[str, Send] = {
            "gossamer": stack.enter_context(gossamer_way(tuple(address["gossamer"]))),
            "gloo": stack.enter_context(gloo_way(folder)),
            "zmq": stack.enter_context(zmq_way(address["zmq"])),
        }
        report(measure(ways, say, args))


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if args.receive:
        receive(args.receive)
    elif args.fuzz:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
        subprocess.run([sys.executable, "-m", "wire.fuzz", str(args.fuzz)], env=environment, check=True)
    else:
        compare(args)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="How fast large words go between two processes on one machine.")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--sizes", type=int, nargs="+", default=[100_000_000, 1_000_000, 4096])
    options.add_argument("--fuzz", type=int, default=0, metavar="STREAMS")
    options.add_argument("--receive", type=Path, help=argparse.SUPPRESS)
    main(options.parse_args())
