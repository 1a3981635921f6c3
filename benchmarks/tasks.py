"""Training tasks, small enough for several workers in one process: examples' models and data, cut into batches."""

import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

from gossamer.algorithms.recipes.recipe import resolve
from gossamer.base import rng
from gossamer.base.layout import Slot

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.byte_models import ByteLSTM, ByteMLP  # found only after the line above
from examples.bytelm import SIZES, ByteLM, windows
from examples.digits import conv, resnet

WINDOWS = 64  # whose loss is followed, and held out
MATRIX = Slot("weight", (64, 64), 0, (64, 1))
Samples = tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]


def steady(made: float) -> float:
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned; `loss(model, *samples)` is a mean over samples.

    samples: to learn from, of those the ones whose loss is followed, and others held out; tensors of one length each.
    dense_seeds: with which Dense() is trained, at least `seeds`: how it differs among them is the yardstick.
    trained_by: what `optimizer` makes; not every compressor can apply its momentum.
    pace: the learning rate's factor by the share of steps that were made; benchmarks/virtual_workers.py follows it.
    """

    about: str
    steps: int
    seeds: int
    dense_seeds: int
    batch: int
    trained_by: type[Optimizer]
    build: Callable[[], nn.Module]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    loss: Callable[..., Tensor]
    samples: Callable[[], Samples]
    pace: Callable[[float], float] = steady

    def takes(self, compressor: str) -> bool:
        owner = resolve(compressor).compressor.owns_momentum(MATRIX)
        return owner is None or issubclass(self.trained_by, owner.optimizers)

    def batches(self, workers: int, seed: int) -> Iterator[list[tuple[Tensor, ...]]]:
        """Without end: disjoint batches, one for each worker; every sample at most once an epoch."""
        learn, *_ = self.samples()
        taken = workers * self.batch
        for epoch in range(2**31):
            order = torch.randperm(len(learn[0]), generator=rng.generator(seed, "order", epoch))
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


@dataclass(frozen=True, kw_only=True)
class Momentum:
    """torch.optim.SGD; not with compressors that take their momentum from Adam."""

    lr: float

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=self.lr, momentum=0.9)

    def __str__(self) -> str:
        return f"SGD, lr {self.lr:g}, momentum 0.9"


@dataclass(frozen=True, kw_only=True)
class Adaptive:
    """torch.optim.AdamW; not with compressors that take their momentum from SGD. Its variance is known after 50 steps,
    for those that freeze it.

    clip: the largest norm of all gradients together, after they were averaged.
    """

    lr: float = 1e-3
    second_beta: float = 0.98
    epsilon: float = 1e-8
    clip: float | None = None

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        every = list(parameters)
        optimizer = AdamW(every, lr=self.lr, betas=(0.9, self.second_beta), eps=self.epsilon)
        if self.clip is not None:
            limit = self.clip
            optimizer.register_step_pre_hook(lambda *_: _clip(every, limit))
        return optimizer

    def __str__(self) -> str:
        clipped = "" if self.clip is None else f", clipped to norm {self.clip:g}"
        return f"AdamW, lr {self.lr:g}, betas 0.9 and {self.second_beta:g}, epsilon {self.epsilon:g}{clipped}"


def _clip(parameters: Iterable[nn.Parameter], limit: float) -> None:
    nn.utils.clip_grad_norm_(parameters, limit)


Learner = Momentum | Adaptive
TRAINED_BY: dict[type[Learner], type[Optimizer]] = {Momentum: SGD, Adaptive: AdamW}


def digits_task(model: Callable[[], nn.Module], optimizer: Learner) -> Task:
    return Task(
        about=f"examples/digits.py, {model.__name__}; {optimizer}; 16 images a worker and step",
        steps=200,
        seeds=5,
        dense_seeds=10,
        batch=16,
        trained_by=TRAINED_BY[type(optimizer)],
        build=model,
        optimizer=optimizer,
        loss=classify,
        samples=digits,
    )


def text_task(optimizer: Learner, size: str = "small", steps: int = 100, seeds: int = 3, dense_seeds: int = 6) -> Task:
    return Task(
        about=f"examples/bytelm.py, {size}; {optimizer}; 8 windows of 64 bytes a worker and step",
        steps=steps,
        seeds=seeds,
        dense_seeds=dense_seeds,
        batch=8,
        trained_by=TRAINED_BY[type(optimizer)],
        build=lambda: ByteLM(*SIZES[size]),
        optimizer=optimizer,
        loss=surprise,
        samples=text,
    )


def byte_task(model: Callable[[], nn.Module], about: str, optimizer: Learner) -> Task:
    """Another model of the same text."""
    task = text_task(optimizer)
    return replace(task, about="; ".join([about, *task.about.split("; ")[1:]]), build=model)


SGD_TASK, ADAMW_TASK = "bytelm", "bytelm-adamw"
TASKS = {
    "digits-conv": digits_task(conv, Momentum(lr=0.02)),
    "digits-conv-adamw": digits_task(conv, Adaptive(lr=3e-3)),
    "digits-resnet": digits_task(resnet, Momentum(lr=0.02)),
    SGD_TASK: text_task(Momentum(lr=0.1)),
    ADAMW_TASK: text_task(Adaptive()),
}
# what the optimizer itself can do about a sparse choice
ADAMW = {
    "lr 0.003": Adaptive(lr=3e-3),
    "second beta 0.9": Adaptive(second_beta=0.9),
    "second beta 0.999": Adaptive(second_beta=0.999),
    "epsilon 1e-4": Adaptive(epsilon=1e-4),
    "gradients clipped to norm 0.3": Adaptive(clip=0.3),
}
ADAMW_TASKS = {f"{ADAMW_TASK}, {changed}": text_task(optimizer, dense_seeds=3) for changed, optimizer in ADAMW.items()}
BASE = {"bytelm-base": text_task(Momentum(lr=0.1), "base", steps=60, seeds=2, dense_seeds=2)}
# models whose gradients look otherwise: the same matrix at each byte, and rows that most batches leave alone
UNLIKE = {
    "lstm": byte_task(ByteLSTM, "an LSTM with an embedding over bytes, 0.26 million parameters", Adaptive(lr=3e-3)),
    "embeddings": byte_task(
        ByteMLP, "two layers over the embeddings of 8 bytes, 0.21 million parameters", Adaptive(lr=3e-3)
    ),
}
