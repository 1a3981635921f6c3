"""Peak memory of a worker over DistributedDataParallel's, for each recipe, in copies of the model's parameters.

Four workers train one model of few and large tensors after another, with DDP and with each recipe, in the same
processes. The peak of resident memory during the steps (Linux: VmHWM) is compared with the memory just before the model
was built. Parameters, gradients and AdamW's moments alone are 4 copies.

    python benchmarks/memory.py [--workers 4] [--width 1536] [--recipe R ...] [--json FILE]
"""

import argparse
import ctypes
import gc
import json
import os
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.overhead import launch, stepper  # found only after the line above
from benchmarks.steps import DDP, RECIPES

import gossamer
from gossamer.comm.environment.host_info import machine

WIDTH, LAYERS, STEPS = 1536, 8, 5  # 19 million parameters: 75 MB


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def copies_at_peak(recipe: str, width: int, world: gossamer.World) -> float:
    """Peak memory of this worker while it trains with `recipe`, in copies of the parameters. width: of its layers."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    world.barrier()
    floor = resident_bytes("VmRSS")
    with ExitStack() as stack:
        model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        optimizer = torch.optim.AdamW(model.parameters())
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        if recipe == DDP:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            stack.enter_context(gossamer.attach(model, optimizer, recipe))
        step = stepper(nn.Sequential(model, Sum()), optimizer, torch.randn(4, width))
        step()
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM: building the session is not counted
        for _ in range(STEPS):
            step()
        return (resident_bytes("VmHWM") - floor) / nbytes


class Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


def measure(recipe: str, width: int, world: gossamer.World) -> dict[str, Any]:
    """The largest peak of all workers."""
    copies = world.all_reduce(copies_at_peak(recipe, width, world), "max")
    return {"recipe": recipe, "copies": copies}


def work(args: argparse.Namespace) -> None:
    world = gossamer.init()
    torch.manual_seed(world.rank)
    measure(DDP, args.width, world)  # the first one also pays for what the process keeps
    rows = [measure(recipe, args.width, world) for recipe in (DDP, *(args.recipe or RECIPES))]
    if not world.is_first:
        return
    print("machine ", ", ".join(f"{name} {value}" for name, value in machine().items()))
    print("command ", shlex.join(["python", *sys.argv]))
    print(f"{'copies of the parameters':26}{'peak':>8}{'over DDP':>10}")
    for row in rows:
        row["over_ddp"] = row["copies"] - rows[0]["copies"]
        print(f"{row['recipe']:26}{row['copies']:8.2f}{row['over_ddp']:+10.2f}")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Peak memory of a worker over DDP's, for each recipe.")
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--width", type=int, default=WIDTH, help="features of each of the model's layers")
    options.add_argument("--recipe", action="append", metavar="R", help="only this one; may be repeated")
    options.add_argument("--json", metavar="FILE")
    args = options.parse_args()
    if "RANK" not in os.environ:
        sys.exit(launch(args.workers))
    work(args)
