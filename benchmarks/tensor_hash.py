"""Tensor hashes: GB/s at which ranks find out whether they begin alike, by threads, beside blake2b and a plain sum.

All take turns in every round; medians over the rounds, and the spread of the middle half.

    python benchmarks/tensor_hash.py [--megabytes 512] [--rounds 15]
"""

import argparse
import os
import shlex
import statistics
import sys
from functools import partial

import torch

from gossamer.comm.environment.host_info import machine
from gossamer.plan.bench.interleave import Timer, interleave, seconds_of, spread
from gossamer.train.checkpoint import digest
from gossamer.train.session.startup_checks import tensor_hashes

TENSORS = 32


def main(megabytes: int, rounds: int) -> None:
    torch.set_num_threads(1)
    tensors = [torch.randn(megabytes * 2**18 // TENSORS) for _ in range(TENSORS)]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    timers: dict[str, Timer] = {
        "blake2b, 1 thread": seconds_of(lambda: digest(tensors)),
        "sum, 1 thread": seconds_of(lambda: [tensor.sum() for tensor in tensors]),
    }
    for threads in (1, 2, 4, 8):
        if threads <= (os.cpu_count() or 1):
            timers[f"hashes, {threads} threads"] = seconds_of(partial(tensor_hashes, tensors, threads))
    found = interleave(timers, rounds)
    print("machine ", ", ".join(f"{name} {value}" for name, value in machine().items()))
    print("command ", shlex.join(["python", *sys.argv]), " load", os.getloadavg()[0])
    for name, seconds in found.items():
        whole = [each[0] for each in seconds]
        rates = nbytes / statistics.median(whole) / 1e9, nbytes / min(whole) / 1e9
        print(f"{name:20} {rates[0]:6.2f} GB/s (spread {spread(whole):.0%}), best {rates[1]:6.2f}")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="GB/s of the hashes that attach compares.")
    options.add_argument("--megabytes", type=int, default=512)
    options.add_argument("--rounds", type=int, default=15)
    args = options.parse_args()
    main(args.megabytes, args.rounds)
