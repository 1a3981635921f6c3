"""Worker of benchmarks/calibration.py: so many steps of a task, on random data, and nothing beside them."""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gossamer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.bytelm import CONTEXT, SIZES, ByteLM  # found only after the line above

BATCH = {"digits": 16, "small": 4, "base": 2}  # of a worker
CLASSES = 10


class Digits(nn.Module):
    """(batch, 1, 8, 8) and labels -> mean cross entropy: examples/digits.py's smaller model."""

    def __init__(self) -> None:
        super().__init__()
        from examples.digits import conv  # scikit-learn, which takes seconds and not every task needs

        self.guess = conv()

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.guess(images), labels)


def built(task: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and a batch."""
    if task == "digits":
        return Digits(), (torch.rand(BATCH[task], 1, 8, 8), torch.randint(CLASSES, (BATCH[task],)))
    return ByteLM(*SIZES[task]), (torch.randint(256, (BATCH[task], CONTEXT + 1), dtype=torch.uint8),)


def main(args: argparse.Namespace) -> None:
    gossamer.init()
    torch.manual_seed(0)
    model, batch = built(args.task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with gossamer.attach(model, optimizer, "Dense()"):
        for _ in range(args.steps):
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Steps of a task.")
    options.add_argument("--task", choices=BATCH, required=True)
    options.add_argument("--steps", type=int, required=True)
    main(options.parse_args())
