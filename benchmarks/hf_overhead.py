"""Overhead of Dense() under Transformers' Trainer: its seconds per step over those of the Trainer's own DDP.

Two workers on this machine train two copies of one GPT-2 in turns, in the same processes: a training of some steps with
DDP, one with Gossamer, then the other way round. Whatever else the machine does slows both alike, and each pair gives
one ratio of two medians.

    gossamer run --workers 2 benchmarks/hf_overhead.py
    gossamer run --workers 2 benchmarks/hf_overhead.py --pairs 1 --steps 6      # to see that it runs
"""

import argparse
import copy
import logging
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from gossamer.integrations.transformers import GossamerTrainer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.provenance import provenance  # found only after the line above

TARGET = 1.02
WARM_UP = 3  # steps of each training that do not count: DDP lays out its buckets anew, pipelines are tuned
CONTEXT = 64
SIZES = {"small": (64, 2), "base": (256, 4)}  # width, blocks


class _StepClock(TrainerCallback):  # type: ignore[misc]
    """The moment at which each step of the last training was over."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.moments: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.moments.append(time.perf_counter())

    def median_seconds(self) -> float:
        return statistics.median(after - before for before, after in pairwise(self.moments[WARM_UP:]))


def timed(trainer: Any) -> tuple[Any, _StepClock]:
    clock = _StepClock()
    trainer.add_callback(clock)
    return trainer, clock


def trainers(size: str, steps: int, batch: int, output: str) -> list[tuple[Any, _StepClock]]:
    """The Trainer with its DDP, and ours, for two copies of one model."""
    options = TrainingArguments(
        output,
        max_steps=steps,
        per_device_train_batch_size=batch,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        ddp_find_unused_parameters=False,  # or DDP looks through the graph in every step
    )
    torch.manual_seed(0)
    width, blocks = SIZES[size]
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=CONTEXT,
            n_embd=width,
            n_layer=blocks,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    rows = torch.randint(256, (4 * steps * batch, CONTEXT))
    data = [{"input_ids": row, "labels": row} for row in rows]
    theirs = Trainer(copy.deepcopy(model), options, train_dataset=data)
    return [timed(theirs), timed(GossamerTrainer(model, options, train_dataset=data, recipe="Dense()"))]


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    logging.getLogger("gossamer").setLevel(logging.ERROR)
    ratios: list[float] = []
    seconds: list[list[float]] = [[], []]  # of DDP's steps and of ours
    with tempfile.TemporaryDirectory() as output:
        both = trainers(args.size, args.steps, args.batch, output)
        for pair in range(args.pairs):
            for which in (0, 1) if pair % 2 == 0 else (1, 0):
                trainer, clock = both[which]
                trainer.train()
                seconds[which].append(clock.median_seconds())
            ratios.append(seconds[1][-1] / seconds[0][-1])
    if both[0][0].args.process_index == 0:
        told = ", ".join(
            f"{name} {1e3 * statistics.median(each):.2f} ms"
            for name, each in zip(("DDP", "Dense()"), seconds, strict=True)
        )
        print(f"GPT-2 {args.size}, batch {args.batch}, {both[0][0].args.world_size} workers: a step takes {told}")
        print(
            f"ratio {statistics.median(ratios):.3f} (target <= {TARGET}), of {args.pairs} pairs from {min(ratios):.3f} "
            f"to {max(ratios):.3f}"
        )
        print(provenance())


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Step time of Dense() under the Trainer, over its own DDP's.")
    options.add_argument("--pairs", type=int, default=20)
    options.add_argument("--steps", type=int, default=30, help="of one training")
    options.add_argument("--size", choices=SIZES, default="base")
    options.add_argument("--batch", type=int, default=8, help="rows per worker and step")
    main(options.parse_args())
