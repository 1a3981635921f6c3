"""Round trips of a remote module, forward and backward, beside torch.distributed.rpc's distributed autograd.

python benchmarks/remote_modules.py [--rounds 50]

Two processes on this machine, one thread each; the libraries take turns in blocks. The module is the identity, so a
round trip moves four tensors: input, output, and the gradients of both.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import gossamer
from gossamer.parallel import remote

SIZES = {"1 kB": 256, "1 MB": 2**18}  # float32 numbers
BLOCK = 5


def echo(x: Tensor) -> Tensor:
    return x * 1


class Echo(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return echo(x)


def timed(trip: Callable[[Tensor], None], numel: int) -> float:
    x = torch.ones(numel, requires_grad=True)
    began = time.perf_counter()
    trip(x)
    return time.perf_counter() - began


def torch_trip() -> Callable[[Tensor], None]:
    from torch.distributed import autograd, rpc

    def trip(x: Tensor) -> None:
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync("1", echo, (x,)).sum()])  # type: ignore[attr-defined]
            assert autograd.get_gradients(context)[x].sum() == x.numel()  # type: ignore[attr-defined]

    return trip


def gossamer_trip(layer: nn.Module) -> Callable[[Tensor], None]:
    def trip(x: Tensor) -> None:
        layer(x).sum().backward()
        assert x.grad is not None
        assert x.grad.sum() == x.numel()

    return trip


def compare(trips: dict[str, Callable[[Tensor], None]], rounds: int) -> None:
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    print(f"{' '.join(sys.argv)}\n\n| bytes | library | median | 10 % to 90 % |\n|---|---|---|---|")
    for size, numel in SIZES.items():
        seconds: dict[str, list[float]] = {name: [] for name in trips}
        for _ in range(-1, rounds // BLOCK):
            for name, trip in trips.items():
                seconds[name] += [timed(trip, numel) for _ in range(BLOCK)]
        for name, found in seconds.items():
            low, *_, high = statistics.quantiles(found[BLOCK:], n=10)
            median = statistics.median(found[BLOCK:])
            print(f"| {size} | {name} | {1e3 * median:.2f} ms | {1e3 * low:.2f} to {1e3 * high:.2f} ms |")


def main(rounds: int) -> None:
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(1)
    world = gossamer.init()
    layer = remote(Echo(), rank=1)
    from torch.distributed import rpc

    os.environ["MASTER_PORT"] = os.environ["RPC_PORT"]
    rpc.init_rpc(str(world.rank), rank=world.rank, world_size=2)
    if world.is_first:
        compare({"gossamer": gossamer_trip(layer), "torch.distributed.rpc": torch_trip()}, rounds)
    rpc.shutdown()


def start(rounds: int) -> None:
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(str(free.getsockname()[1]))
    here = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": ports[0]}
    command = [sys.executable, str(Path(__file__)), "--rounds", str(rounds)]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **here, "RPC_PORT": ports[1], "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(2)
    ]
    sys.exit(max(abs(rank.wait()) for rank in ranks))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Round trips of remote modules.")
    options.add_argument("--rounds", type=int, default=50)
    (main if "RPC_PORT" in os.environ else start)(options.parse_args().rounds)
