"""A training script for any task of benchmarks/tasks.py, as a user would write it: for real runs and simulated ones.

gossamer run --workers 4 --recipe "TopK(0.01)" benchmarks/task_script.py bytelm-adamw --steps 200
"""

import argparse
import sys
from itertools import islice
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.tasks import BASE, TASKS, UNLIKE  # found only after the line above

import gossamer

KNOWN = {**TASKS, **UNLIKE, **BASE}


def main(args: argparse.Namespace) -> None:
    task = KNOWN[args.task]
    torch.manual_seed(args.seed)
    world = gossamer.init()
    *_, held_out = task.samples()
    model = task.build().to(world.device)
    optimizer = task.optimizer(model.parameters())

    def evaluate() -> float:
        model.eval()
        with torch.no_grad(), session.averaged_parameters(model):
            loss = float(task.loss(model, *held_out))
        model.train()
        return loss

    with gossamer.attach(model, optimizer, args.recipe) as session:
        batches = islice(task.batches(world.size, args.seed), args.steps)
        for step, batch in enumerate(batches, 1):
            loss = task.loss(model, *batch[world.rank])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log(loss=loss.item())
            if step % args.evaluate_every == 0 or step == args.steps:
                session.log(validation_loss=evaluate())
            if session.should_stop:
                break


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Trains one of the benchmarks' tasks.")
    options.add_argument("task", choices=KNOWN)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--evaluate-every", type=int, default=10, metavar="STEPS")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--recipe", default="Dense()", help="communication recipe")
    main(options.parse_args())
