"""DDP baseline: examples/bytelm.py's model under DistributedDataParallel, with torch's own hooks.

    gossamer run --workers 4 --network 100mbit,20ms benchmarks/ddp.py --hook fp16 --steps 20

Prints one line of JSON on rank 0: the seconds of every step.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gossamer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.bytelm import CONTEXT, SIZES, ByteLM  # found only after the line above


def main(args: argparse.Namespace) -> None:
    world = gossamer.init()
    torch.manual_seed(0)
    model = ByteLM(*SIZES[args.size])
    megabytes = 1000 if args.one_bucket else 25
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=megabytes)
    if args.hook == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif args.hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(world.rank)
    seconds: list[float] = []
    for _ in range(args.steps):
        began = time.perf_counter()
        ddp(torch.randint(256, (args.batch, CONTEXT + 1), generator=draw)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    if world.is_first:
        print("RESULT", json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="DistributedDataParallel, for comparison.")
    options.add_argument("--hook", choices=["none", "fp16", "powersgd"], default="none")
    options.add_argument("--one-bucket", action="store_true", help="torch's PowerSGD hook aborts on Gloo with several")
    options.add_argument("--size", choices=SIZES, default="base")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--batch", type=int, default=8)
    main(options.parse_args())
