"""Small training tasks that a simulation of several workers can afford: examples' models and data, cut into batches."""

import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

from gossamer import seeds

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.bytelm import SIZES, ByteLM, windows  # found only after the line above
from examples.digits import conv, resnet

WINDOWS = 64  # whose loss is followed, and held out
Samples = tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned; `loss(model, *samples)` is a mean over samples.

    samples: to learn from, of those the ones whose loss is followed, and others held out; tensors of one length each.
    without: the compressor, by class, that cannot serve this optimizer.
    """

    about: str
    steps: int
    seeds: int
    batch: int
    without: str
    build: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    loss: Callable[..., Tensor]
    samples: Callable[[], Samples]

    def batches(self, workers: int, seed: int) -> Iterator[list[tuple[Tensor, ...]]]:
        """Without end: disjoint batches, one for each worker; every sample at most once an epoch."""
        learn, *_ = self.samples()
        taken = workers * self.batch
        for epoch in range(2**31):
            order = torch.randperm(len(learn[0]), generator=seeds.generator(seed, "order", epoch))
            for start in range(0, len(order) - taken + 1, taken):
                parts = order[start : start + taken].view(workers, self.batch)
                yield [tuple(tensor[part] for tensor in learn) for part in parts]


@cache
def digits() -> Samples:
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    learn, exam = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=found.target)
    learned = images[learn], labels[learn]
    return learned, learned, (images[exam], labels[exam])


@cache
def text() -> Samples:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    learn, held_out = windows([file for i, file in enumerate(files) if i % 10]), windows(files[::10])
    return (learn,), (thinned(learn),), (thinned(held_out),)


def thinned(windows: Tensor) -> Tensor:
    """About WINDOWS of them, from all over."""
    return windows[:: len(windows) // WINDOWS]


def classify(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(model(images), labels)


def surprise(model: nn.Module, text: Tensor) -> Tensor:
    found: Tensor = model(text)
    return found


def momentum_sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.02, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """A variance that is known after 50 steps, for compressors that freeze it."""
    return AdamW(parameters, lr=1e-3, betas=(0.9, 0.98))


TASKS = {
    "digits-conv": Task(
        about="examples/digits.py, conv; SGD, lr 0.02, momentum 0.9; 16 images a worker and step",
        steps=200,
        seeds=5,
        batch=16,
        without="OneBitAdam",
        build=conv,
        optimizer=momentum_sgd,
        loss=classify,
        samples=digits,
    ),
    "digits-resnet": Task(
        about="examples/digits.py, resnet; SGD, lr 0.02, momentum 0.9; 16 images a worker and step",
        steps=200,
        seeds=5,
        batch=16,
        without="OneBitAdam",
        build=resnet,
        optimizer=momentum_sgd,
        loss=classify,
        samples=digits,
    ),
    "bytelm": Task(
        about="examples/bytelm.py, small; AdamW, lr 0.001, betas 0.9 and 0.98; 8 windows of 64 bytes a worker and step",
        steps=150,
        seeds=3,
        batch=8,
        without="DGC",
        build=lambda: ByteLM(*SIZES["small"]),
        optimizer=adamw,
        loss=surprise,
        samples=text,
    ),
}
