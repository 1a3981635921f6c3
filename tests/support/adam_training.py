"""Training by Adam whose work compressors share, by virtual workers and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.virtual_workers import Worker, agree, batch, cluster, joined, parameters, seeded, train_step
from torch import Tensor, nn
from torch.nn.functional import mse_loss

WORLD = 3
LR, BETAS, EPS, DECAY = 0.01, (0.8, 0.95), 1e-6, 0.1
Adam = torch.optim.Adam
#: (parameter, gradient, how many gradients it had, its memory) -> the direction in which it moves
Direction = Callable[[Tensor, Tensor, int, dict[str, Any], tuple[float, float]], Tensor]

SPARSE = "TopK(density=0.1)"
#: Every rule by which a compressor moves Adam's parameters
RULES = [
    f'CompressedAdam({SPARSE}, variance="momentum")',
    f'CompressedAdam({SPARSE}, variance="agreed")',
    f'CompressedAdam({SPARSE}, variance="rows", warmup=3)',
    'CompressedAdam(OneBit(), variance="frozen", warmup=3, clip=1.0)',
    f"MicroAdam({SPARSE}, window=3)",
    f"AdamUpdate({SPARSE})",
    "AdamUpdate(Int8(), clip=1.0)",
]


def adam(model: nn.Module, kind: type[Adam] = torch.optim.AdamW, **options: Any) -> Adam:
    """Two groups that differ in what they may."""
    first, *rest = model.parameters()
    groups = [{"params": [first], "lr": 2 * LR}, {"params": rest, "weight_decay": DECAY / 2}]
    return kind(groups, **{"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, **options})


def matrices(seed: int) -> nn.Module:
    """A model without biases: every tensor is one that the compressor takes."""
    with seeded(seed):
        return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).double()


def everywhere(term: str) -> str:
    return f"Route({term}, smallest=0)"


def schedule(optimizer: torch.optim.Optimizer, step: int) -> None:
    """As OneCycleLR moves learning rates and first betas."""
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = LR * (2 - number) * (1 + step % 3)
        group["betas"] = (0.8 - 0.05 * (step % 3), group["betas"][1])


def together(term: str, kind: type[Adam] = torch.optim.AdamW, *, cycle: bool = False, **options: Any) -> Tensor:
    def work(worker: Worker) -> Tensor:
        model = matrices(worker.rank)
        optimizer = adam(model, kind, **options)
        worker.attach(model, optimizer, everywhere(term))
        for step in range(10):
            if cycle:
                schedule(optimizer, step)
            train_step(model, optimizer, step, worker.rank)
        return parameters(model)

    return agree(cluster(work, WORLD))


def by_hand(
    direction: Direction, kind: type[Adam] = torch.optim.AdamW, *, cycle: bool = False, **options: Any
) -> Tensor:
    """One process on the joined batch, that moves as `direction` says. Weight decay is AdamW's or Adam's."""
    model = matrices(0)
    optimizer = adam(model, kind, **options)
    memory: dict[Tensor, dict[str, Any]] = {p: {} for p in model.parameters()}
    for step in range(10):
        if cycle:
            schedule(optimizer, step)
        optimizer.zero_grad()
        inputs, targets = joined(batch(step, rank) for rank in range(WORLD))
        mse_loss(model(inputs), targets).backward()
        with torch.no_grad():
            for group in optimizer.param_groups:
                lr, decay = group["lr"], group["weight_decay"]
                for p in group["params"]:
                    coupled = kind is Adam
                    gradient = p.grad + decay * p if coupled else p.grad
                    moved = p if coupled else p * (1 - lr * decay)
                    p.copy_(moved - lr * direction(p, gradient, step + 1, memory[p], group["betas"]))
    return parameters(model)


def by_torch(kind: type[Adam] = torch.optim.AdamW, *, cycle: bool = False, **options: Any) -> Tensor:
    """One process on the joined batch, with torch's own optimizer."""
    model = matrices(0)
    optimizer = adam(model, kind, **options)
    for step in range(10):
        if cycle:
            schedule(optimizer, step)
        optimizer.zero_grad()
        inputs, targets = joined(batch(step, rank) for rank in range(WORLD))
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return parameters(model)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


class Words(nn.Module):
    """An embedding of which most rows are never looked up."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.table, self.head = nn.Embedding(40, 8), nn.Linear(8, 3, bias=False)

    def forward(self, places: Tensor) -> Tensor:
        found: Tensor = self.head(self.table(places))
        return found


def unused_rows(term: str) -> tuple[Tensor, Tensor, Tensor]:
    """(the rows that nobody looked up before, after, those that were looked up after) some training."""

    def work(worker: Worker) -> tuple[Tensor, Tensor, Tensor]:
        model = Words()
        before = model.table.weight.detach()[10:].clone()
        optimizer = adam(model, weight_decay=0.0)
        optimizer.param_groups[1]["weight_decay"] = 0.0
        worker.attach(model, optimizer, everywhere(term))
        for step in range(12):
            optimizer.zero_grad()
            places = torch.randint(0, 10, (6,), generator=torch.Generator().manual_seed(10 * step + worker.rank))
            model(places).square().mean().backward()
            optimizer.step()
        return before, *model.table.weight.detach().clone().split([10, 30])[::-1]

    return cluster(work, 2)[0]  # type: ignore[no-any-return]
