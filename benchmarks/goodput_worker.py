"""A worker of benchmarks/goodput.py: a tiny model, steps of a fixed time, and a line for each step.

A step waits instead of computing, so that eight workers fit on two cores; only communication and starts need them.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.elastic_worker import STOP, StepLog  # found only after the line above

import gossamer

WIDTH = 64
STEP_SECONDS = 0.2


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    log = StepLog(args.folder, int(os.environ.get("GOSSAMER_PLACE", os.environ.get("RANK", "0"))))
    world = gossamer.init()
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stop = args.folder / STOP
    with gossamer.attach(model, optimizer) as session:
        while not session.should_stop:
            time.sleep(STEP_SECONDS)
            loss = model(torch.randn(8, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log.write(session.steps, loss.item(), world.size, world.rank)
            if stop.exists():
                session.request_stop()
    log.end(step=session.steps)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--folder", type=Path, required=True, help="where each process's file is")
    main(options.parse_args())
