"""Worker of benchmarks/gpu_network.py: trains the GPT-2-shaped model; all workers of a machine share one GPU.

Prints one line of JSON on rank 0: the seconds of every step.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.gpu_device import settled  # found only after the line above
from benchmarks.gpu_step import SMALL, LanguageModel, Shape, stepper, tokens

import gossamer


def main(args: argparse.Namespace) -> None:
    world = gossamer.init()
    torch.manual_seed(0)
    shape, device = SMALL if args.small else Shape(), torch.device(args.device)
    model = LanguageModel(shape).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    seconds: list[float] = []
    with gossamer.attach(model, optimizer):
        step, settle = stepper(model, optimizer, tokens(shape, device, world.rank)), settled(device)
        for _ in range(args.steps):
            settle()
            began = time.perf_counter()
            step()
            settle()
            seconds.append(time.perf_counter() - began)
    if world.is_first:
        print("RESULT", json.dumps(seconds), flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="A GPT-2-shaped model on one GPU that all workers share.")
    options.add_argument("--device", default="cuda:0")
    options.add_argument("--small", action="store_true", help="a model for a processor")
    options.add_argument("--steps", type=int, default=24)
    main(options.parse_args())
