"""Overhead of Dense() inside Ray Train: its seconds per step over those of Ray's own prepare_model, which is DDP.

Two workers of a local Ray train two copies of one model in turns, in the same processes: a block of steps with DDP, a
block with Gossamer, then the other way round; each pair of blocks gives one ratio.

    python benchmarks/ray_overhead.py [--blocks 20] [--steps 20] [--width 1024]
"""

import argparse
import copy
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import gossamer
from gossamer.integrations.ray import GossamerConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import provenance  # after the line above

WORKERS = 2

Way = tuple[nn.Module, torch.optim.Optimizer]


def seconds_per_step(way: Way, x: torch.Tensor, steps: int) -> float:
    model, optimizer = way
    began = time.perf_counter()
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - began) / steps


def compare(config: dict[str, Any]) -> None:
    """On every worker."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gossamer.init()
    width = config["width"]
    ours = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())))
    plain = prepare_model(copy.deepcopy(ours))
    x = torch.randn(16, width)
    ways: list[Way] = [(model, torch.optim.SGD(model.parameters(), lr=1e-3)) for model in (plain, ours)]
    with gossamer.attach(*ways[1], "Dense()"):
        for way in ways:
            seconds_per_step(way, x, 5)  # links are measured and buckets made
        for block in range(config["blocks"]):
            turn: Callable[..., Any] = reversed if block % 2 else list
            seconds = [(way is ways[1], seconds_per_step(way, x, config["steps"])) for way in turn(ways)]
            told = {"ours" if is_ours else "plain": value for is_ours, value in seconds}
            train.report({"block": block, **told})


def main(args: argparse.Namespace) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local", num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000
    )
    pairs: list[tuple[float, float]] = []

    class Collect(train.UserCallback):  # type: ignore[misc]
        """Writes rank 0's blocks where this process reads them."""

        def __init__(self, path: str) -> None:
            self.path = path

        def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
            with open(self.path, "a") as file:
                file.write(f"{metrics[0]['plain']} {metrics[0]['ours']}\n")

    with tempfile.TemporaryDirectory() as folder:
        blocks = os.path.join(folder, "blocks")
        TorchTrainer(
            compare,
            train_loop_config={"blocks": args.blocks, "steps": args.steps, "width": args.width},
            torch_config=GossamerConfig(),
            scaling_config=ScalingConfig(num_workers=WORKERS),
            run_config=RunConfig(storage_path=folder, callbacks=[Collect(blocks)]),
        ).fit()
        with open(blocks) as file:
            pairs = [(float(plain), float(ours)) for plain, ours in map(str.split, file)]
    ray.shutdown()
    ratios = sorted(ours / plain for plain, ours in pairs)
    plain, ours = (statistics.median(each) * 1e3 for each in zip(*pairs, strict=True))
    print(f"prepare_model {plain:.2f} ms, Dense() {ours:.2f} ms a step, medians of {len(pairs)} blocks")
    print(f"ratio {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}")
    print(provenance())


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Dense() over Ray Train's own DDP.")
    options.add_argument("--blocks", type=int, default=20)
    options.add_argument("--steps", type=int, default=20, help="of each block")
    options.add_argument("--width", type=int, default=1024, help="of four square layers")
    main(options.parse_args())
