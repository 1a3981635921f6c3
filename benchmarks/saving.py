"""Saving: what a checkpoint costs a training loop that waits for it, and one that has it written beside its steps.

One worker trains a stack of linear layers. A round is the same number of steps without a save, with one at its
beginning, and with an asynchronous one; all take turns. The next round's save waits where the disk is slower than the
steps of one. Medians over the rounds, and the spread of the middle half.

    python benchmarks/saving.py [--megabytes 256] [--steps 20] [--rounds 7] [--device cpu] [--directory DIR]
"""

import argparse
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

import torch
from torch import nn

import gossamer
from gossamer.comm.environment.host_info import machine
from gossamer.plan.bench.interleave import Timer, interleave, spread

LAYERS = 8


class Training:
    """A model of so many megabytes whose optimizer remembers twice as much."""

    def __init__(self, megabytes: int, device: str, directory: str) -> None:
        width = int((megabytes * 2**18 / LAYERS) ** 0.5)
        self.directory, self.x = directory, torch.randn(16, width, device=device)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.session = gossamer.attach(self.model, self.optimizer)

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wait(self) -> None:
        if self.x.is_cuda:
            torch.cuda.synchronize()

    def timer(self, steps: int, **options: bool) -> Timer:
        """Seconds of the call of save, and of the whole round, in which it may be written."""

        def timed() -> Sequence[float]:
            self.wait()
            began = time.perf_counter()
            if options:
                self.session.save(self.directory, **options)
            saved = time.perf_counter()
            for _ in range(steps):
                self.step()
            self.wait()
            ended = time.perf_counter()
            self.session.load(os.path.join(self.directory, "none"))  # waits for what is being written
            return saved - began, ended - began, time.perf_counter() - ended

        return timed


def main(args: argparse.Namespace, directory: str) -> None:
    training = Training(args.megabytes, args.device, directory)
    for _ in range(3):
        training.step()
    timers: dict[str, Timer] = {
        "no save": training.timer(args.steps),
        "save": training.timer(args.steps, asynchronous=False),
        "save, asynchronous": training.timer(args.steps, asynchronous=True),
    }
    found = interleave(timers, args.rounds)
    nbytes = 3 * sum(parameter.nbytes for parameter in training.model.parameters())
    print("machine ", ", ".join(f"{name} {value}" for name, value in machine().items()))
    print("command ", shlex.join(["python", *sys.argv]), " load", os.getloadavg()[0])
    print(f"a checkpoint of {nbytes / 1e6:,.0f} MB; rounds of {args.steps} steps")
    alone = statistics.median(whole for _, whole, _ in found["no save"])
    for name, seconds in found.items():
        saves, wholes, rests = zip(*seconds, strict=True)
        whole = statistics.median(wholes)
        print(
            f"{name:20} round {whole:7.3f} s (spread {spread(wholes):.0%}), {whole / alone:5.2f} of one without; "
            f"the call {statistics.median(saves):7.3f} s (spread {spread(saves):.0%}); "
            f"still writing afterwards {statistics.median(rests):6.3f} s"
        )
    training.session.close()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="What a checkpoint costs a training loop.")
    options.add_argument("--megabytes", type=int, default=256, help="of the model; a checkpoint has thrice that")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--device", default="cpu")
    options.add_argument("--directory", help="where the disk is that is meant; by default a temporary one")
    args = options.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as place:
        main(args, place)
