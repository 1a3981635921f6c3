"""The training of bytelm.py with torch's DistributedDataParallel, for comparison.

gossamer run --workers 4 --network 100mbit,20ms examples/bytelm_ddp.py --json ddp.json

The file has the form of a session's record: steps, seconds, and every logged value by step and second.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import gossamer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.bytelm import SIZES, ByteLM, data_of  # found only after the line above


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    world = gossamer.init()
    texts, exam = data_of(world, args.batch, args.seed)
    model = DistributedDataParallel(ByteLM(*SIZES[args.size]).to(world.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    began, losses = time.perf_counter(), []
    for step in range(1, args.steps + 1):
        model(next(texts).to(world.device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % args.evaluate_every == 0 or step == args.steps:
            with torch.no_grad():
                loss = gossamer.mean(float(model.module(exam)))
            seconds = gossamer.mean(time.perf_counter() - began)
            losses.append((step, seconds, loss))
            if seconds > args.seconds:  # the same on every rank
                break
    if world.is_first:
        record = {"recipe": "plain DDP", "workers": world.size, "steps": step, "seconds": seconds}
        args.json.write_text(json.dumps({**record, "metrics": {"validation_loss": losses}}))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="A byte-level language model with DistributedDataParallel.")
    options.add_argument("--json", type=Path, required=True, help="write the record there")
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--size", choices=SIZES, default="small")
    options.add_argument("--batch", type=int, default=8, help="windows per worker and step")
    options.add_argument("--learning-rate", type=float, default=1e-3)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop at the first evaluation after this many seconds"
    )
    options.add_argument("--evaluate-every", type=int, default=10, metavar="STEPS")
    main(options.parse_args())
