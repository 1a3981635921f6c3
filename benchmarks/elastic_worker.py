"""A worker of the programs that show elastic runs: a small language model of bytes, whose every step is written down.

Started by benchmarks/elastic_runs.py. Each process has a file of its own, which it appends to: what a killed process
had done stays known.
"""

import argparse
import hashlib
import itertools
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.bytelm import ByteLM, windows  # found only after the line above

import gossamer

SIZES = {"tiny": (32, 2, 2), "small": (64, 4, 4), "base": (256, 4, 4)}  # width, blocks, heads
BATCH, EXAM = 8, 256  # windows
LOOK_STEPS = 20  # between two looks at the process's own memory
STOP = "stop"  # the file that ends a run


class StepLog:
    """Appends a line a step, which outlives the process: step, monotonic seconds, loss, workers, rank, MB, files."""

    def __init__(self, folder: Path, place: int) -> None:
        self.stem = folder / f"{place}-{os.getpid()}"
        self._file = os.open(self.stem.with_suffix(".steps"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.lines, self._held = 0, ""

    def write(self, step: int, loss: float, size: int, rank: int) -> None:
        now = time.monotonic()
        if self.lines % LOOK_STEPS == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            megabytes = pages * os.sysconf("SC_PAGESIZE") / 1e6
            self._held = f"{megabytes:.1f} {len(os.listdir('/proc/self/fd'))}"
        self.lines += 1
        os.write(self._file, f"{step} {now:.6f} {loss:.6f} {size} {rank} {self._held}\n".encode())

    def end(self, **found: object) -> None:
        draft = self.stem.with_suffix(".draft")
        draft.write_text(json.dumps(found))
        draft.rename(self.stem.with_suffix(".json"))


def texts() -> tuple[Tensor, Tensor]:
    """Windows to train on, and the held-out ones of the validation."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    held_out = windows(files[::10])
    return windows([file for i, file in enumerate(files) if i % 10]), held_out[:: len(held_out) // EXAM][:EXAM]


def parameter_hash(model: nn.Module) -> str:
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def validation(model: nn.Module, exam: Tensor) -> float:
    with torch.no_grad():
        return float(model(exam))


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    log = StepLog(args.folder, int(os.environ.get("GOSSAMER_PLACE", os.environ.get("RANK", "0"))))
    training, exam = texts()
    world = gossamer.init()
    data = DataLoader(TensorDataset(training), BATCH, sampler=world.shard(training, seed=args.seed), drop_last=True)
    batches: Iterator[Tensor] = (text for _ in itertools.count() for (text,) in data)
    model = ByteLM(*SIZES[args.size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stop = args.folder / STOP
    with gossamer.attach(model, optimizer) as session:
        spent, before = time.process_time(), 0
        while session.steps < args.steps and not session.should_stop:
            loss = model(next(batches))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log.write(session.steps, loss.item(), world.size, world.rank)
            if log.lines == LOOK_STEPS:  # what is made once is made by then
                spent, before = time.process_time(), log.lines
            if stop.exists():
                session.request_stop()
        processor_seconds = (time.process_time() - spent) / max(log.lines - before, 1)  # of a step
        with session.averaged_parameters(model):
            log.end(
                hash=parameter_hash(model),
                loss=validation(model, exam),
                step=session.steps,
                size=world.size,
                processor_seconds=processor_seconds,
            )


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--folder", type=Path, required=True, help="where each process's file is")
    options.add_argument("--steps", type=int, default=sys.maxsize)
    options.add_argument("--size", choices=SIZES, default="tiny")
    options.add_argument("--seed", type=int, default=0)
    main(options.parse_args())
