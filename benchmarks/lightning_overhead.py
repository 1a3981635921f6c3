"""Overhead under Lightning: a step with GossamerStrategy("Dense()") over one with Lightning's own "ddp".

Two workers train the same model on the same bytes; within one job fits take turns, and which is first alternates.

    python benchmarks/lightning_overhead.py [--pairs 7] [--steps 200] [--size small] [--recipe RECIPE]
    python benchmarks/lightning_overhead.py --quick         # two short pairs, to see that it runs
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.elastic_runs import spread  # found only after the line above
from benchmarks.provenance import ROOT, provenance
from benchmarks.report import markdown
from examples.bytelm import CONTEXT, SIZES, ByteLM

WORKERS = 2
WARM_UP = 20
TARGET = 1.02
DDP, OURS = "ddp", "gossamer"


def worker(args: argparse.Namespace) -> None:
    """One of the workers: the median seconds of a step, for each way and pair, into a file of rank 0's."""
    import lightning

    import gossamer
    from gossamer.integrations.lightning import GossamerStrategy

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    world = gossamer.init()

    class Learner(lightning.LightningModule):  # type: ignore[misc]  # Any, where Lightning is not installed
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = ByteLM(*SIZES[args.size])
            self.times: list[float] = []

        def training_step(self, batch: list[Tensor], number: int) -> Any:
            return self.net(batch[0])

        def on_train_batch_end(self, *_: Any) -> None:
            self.times.append(time.perf_counter())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    count = (WARM_UP + args.steps + 1) * args.batch * world.size
    texts = torch.randint(256, (count, CONTEXT + 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(texts), args.batch)

    def median_step(way: str) -> float:
        trainer = lightning.Trainer(
            strategy=GossamerStrategy(args.recipe) if way == OURS else DDP,
            accelerator="cpu",
            devices=world.size,
            max_steps=WARM_UP + args.steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = Learner()
        trainer.fit(model, data)
        return statistics.median(after - before for before, after in pairwise(model.times[WARM_UP:]))

    found: dict[str, list[float]] = {DDP: [], OURS: []}
    for pair in range(args.pairs):
        for way in (DDP, OURS) if pair % 2 == 0 else (OURS, DDP):
            found[way].append(median_step(way))
    if world.is_first:
        Path(args.found).write_text(json.dumps(found))


def main(args: argparse.Namespace) -> None:
    if args.quick:
        args.pairs, args.steps = 2, 20
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        options = {"pairs": args.pairs, "steps": args.steps, "size": args.size, "batch": args.batch}
        options |= {"recipe": args.recipe, "found": path}
        run = [sys.executable, "-m", "gossamer", "run", "--workers", str(WORKERS), __file__]
        run += [text for name, value in options.items() for text in (f"--{name}", str(value))]
        ended = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(f"the workers failed:\n{ended.stdout}{ended.stderr}")
        found = json.loads(path.read_text())
    over = [ours / theirs for ours, theirs in zip(found[OURS], found[DDP], strict=True)]
    line = {
        "": args.recipe,
        "ddp, ms": spread([1000 * each for each in found[DDP]]),
        "gossamer, ms": spread([1000 * each for each in found[OURS]]),
        "gossamer over ddp": spread(over, 3),
        f"at most {TARGET}": "yes" if statistics.median(over) <= TARGET else "no",
    }
    print(
        f"{WORKERS} workers learn bytes ({args.size}, {args.batch} texts a worker and step) in Lightning's Trainer. "
        f"Median step of {args.steps} after {WARM_UP}; of {args.pairs} pairs of fits, which take turns within one job, "
        f"the median (the least to the most).\n\n{markdown([line])}\n\n{provenance()}"
    )


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--pairs", type=int, default=7)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--size", default="small", choices=SIZES, help="of the model")
    options.add_argument("--batch", type=int, default=8, help="texts per worker and step")
    options.add_argument("--recipe", default="Dense()")
    options.add_argument("--found", help="of a worker: the file to write")
    options.add_argument("--quick", action="store_true", help="two short pairs")
    arguments = options.parse_args()
    (worker if arguments.found else main)(arguments)
