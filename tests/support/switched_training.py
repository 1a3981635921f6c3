"""Switched training: workers whose gradients are whole numbers, so that what a chain of recipes loses shows exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from support.virtual_workers import Worker, agree, cluster
from torch import Tensor, nn
from torch.optim import SGD

from gossamer.train.session.session import Session

STRATEGIES = (
    "EveryStep()",
    "EveryStep(accumulate=2)",
    "EveryStep(delay=2)",
    "LocalSGD(period=3)",
    "LocalSGD(period=2, per_site=2)",
    "DiLoCo(period=4, outer_learning_rate=1.0, outer_momentum=0.0, fragments=2)",
    "DelayedAveraging(delay=2, period=2)",
)
EXACT = ("Dense()", "TopK(density=0.05)", "Feedback(RandomK(density=0.05))", "Warmup(TopK(density=0.05), steps=2)")
ROUNDED = (
    "Feedback(Sharded(Int8()))",
    "OneBit()",
    "PowerSGD(rank=1)",
    "Hierarchical(OneBit(), per_node=2)",
    "Chain(TopK(density=0.05), Int8())",
    "Feedback(SparseSum(TopK(density=0.05)))",
)
UNCOMPRESSED = (
    "PostLocalSGD(period=2, start=3)",
    "Gossip()",
)  # the one drops residuals at its start, the other has none


def recipes(compressors: Sequence[str]) -> list[str]:
    """Every strategy with every compressor that goes with it."""
    pairs = [f"{strategy} + {compressor}" for strategy in STRATEGIES for compressor in compressors]
    return [*pairs, *UNCOMPRESSED]


def sampled_chains(compressors: Sequence[str], count: int, length: int, seed: int) -> list[list[str]]:
    """Chains of recipes, in which every ordered pair of neighbors is as likely as any other."""
    random, known = Random(seed), recipes(compressors)
    return [[random.choice(known) for _ in range(length)] for _ in range(count)]


class Linear(nn.Module):
    """Parameters whose gradients are whatever the loss multiplies them by: two matrices worth compressing, and two
    tensors that go dense."""

    def __init__(self) -> None:
        super().__init__()
        shapes = (24, 20), (7,), (18, 16), (3, 3)
        self.held = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes)


def given(model: nn.Module, passed: int, rank: int) -> list[Tensor]:
    """The gradients of a worker's backward pass: whole numbers from -8 to 8."""
    generator = torch.Generator().manual_seed(7919 * passed + rank)
    return [torch.randint(-8, 9, p.shape, generator=generator).to(p.dtype) for p in model.parameters()]


@dataclass
class Pass:
    """One backward pass, and the optimizer's step if it is due."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def make(self, gradients: Sequence[Tensor]) -> None:
        self.optimizer.zero_grad()
        losses = [(p * g).sum() for p, g in zip(self.model.parameters(), gradients, strict=True)]
        torch.stack(losses).sum().backward()
        self.optimizer.step()


def passes(recipe: str, random: Random) -> int:
    """How many to make under a recipe: where two make a step, an even number."""
    count = random.randrange(1, 7)
    return 2 * count if "accumulate=2" in recipe else count


def made(recipe: str) -> float:
    """What a pass counts: accumulated gradients are a mean over passes."""
    return 0.5 if "accumulate=2" in recipe else 1.0


Watch = Callable[[Session, int], object]


def loss_of_chain(chain: Sequence[str], world: int, seed: int, watch: Watch = lambda session, rank: None) -> float:
    """By how much the parameters, after all that is owed was sent, differ from those of whom nothing was lost.

    law: x = x_0 - sum over passes of the mean gradient, with SGD(lr=1), whatever the recipes were
    """

    def work(worker: Worker) -> Tensor:
        model, optimizer, session = worker.start(Linear(), lambda m: SGD(m.parameters(), lr=1.0), chain[0])
        one, random, number = Pass(model, optimizer), Random(seed), 0
        wanted = [torch.zeros_like(p) for p in model.parameters()]
        for recipe in chain:
            session.switch(recipe)
            watch(session, worker.rank)
            for _ in range(passes(recipe, random)):
                one.make(given(model, number, worker.rank))
                for total, *each in zip(wanted, *(given(model, number, rank) for rank in range(world)), strict=True):
                    total.sub_(torch.stack(each).mean(0), alpha=made(recipe))
                number += 1
        session.switch("EveryStep()")
        one.make([torch.zeros_like(p) for p in model.parameters()])
        agree_on = torch.cat([p.detach().flatten() for p in model.parameters()])
        return torch.stack([agree_on, torch.cat([total.flatten() for total in wanted])])

    found, expected = agree(cluster(work, world))
    return float((found - expected).abs().max())
