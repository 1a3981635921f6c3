"""A tiny LightningModule on integer-valued data, and the same training as a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gossamer

SAMPLES, BATCH = 32, 4


def samples(count: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randint(-4, 5, (count, 32), generator=generator).float()
    return TensorDataset(inputs, torch.randint(-4, 5, (count, 3), generator=generator).float())


def network(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Dropout(dropout), nn.Tanh(), nn.Linear(64, 3))


def momentum(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, 0.02, momentum=0.9)


class Tiny(lightning.LightningModule):
    """Keeps what it sees: the batches, and the parameters that validation evaluates."""

    def __init__(self, seed: int = 0, dropout: float = 0.0, rule: Callable[..., Optimizer] = momentum) -> None:
        super().__init__()
        self.net, self._rule = network(seed, dropout), rule
        self.seen: list[Tensor] = []
        self.evaluated: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, batch: Any, number: int) -> Tensor:
        inputs, targets = batch
        self.seen.append(inputs.clone())
        loss = mse_loss(self.net(inputs), targets)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        inputs, targets = batch
        self.evaluated.append(flat(self))
        self.log("missed", mse_loss(self(inputs), targets), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = self._rule(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 2, gamma=0.5)}


class ByHand(Tiny):
    """Manual optimization: a step of every optimizer for each batch."""

    def __init__(self, optimizers: int = 1) -> None:
        super().__init__()
        self.automatic_optimization, self._optimizers = False, optimizers

    def training_step(self, batch: Any, number: int) -> None:  # type: ignore[override]
        inputs, targets = batch
        mine = self.optimizers()
        for optimizer in mine if isinstance(mine, list) else [mine]:
            self.net.zero_grad()
            self.manual_backward(mse_loss(self.net(inputs), targets))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        parts = [self.net] if self._optimizers == 1 else [self.net[0], self.net[3]]
        return [momentum(part.parameters()) for part in parts]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in model.parameters()])


def loader(data: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(samples() if data is None else data, BATCH, **options)


def trainer(folder: Path, strategy: Any = "gossamer", **options: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"enable_checkpointing": False, "max_epochs": 2, "devices": 1, "default_root_dir": folder}
    quiet |= {"num_sanity_val_steps": 0}
    return lightning.Trainer(strategy=strategy, **(quiet | options))


def plain_loop(
    recipe: str, epochs: int, *, accumulate: int = 1, clip: float | None = None, seed: int = 0, shuffle: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """The same training by gossamer.attach alone: the parameters at its end, and the batches."""
    world = gossamer.init()
    model = network(seed)
    optimizer = momentum(model.parameters())
    scheduler = StepLR(optimizer, 2, gamma=0.5)
    sampler = DistributedSampler(samples(), world.size, world.rank, shuffle=shuffle, seed=0)
    seen = []
    with gossamer.attach(model, optimizer, recipe, scheduler=scheduler) as session:
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for number, (inputs, targets) in enumerate(loader(sampler=sampler), start=1):
                seen.append(inputs)
                if number % accumulate:
                    with session.no_sync():
                        (mse_loss(model(inputs), targets) / accumulate).backward()
                    continue
                (mse_loss(model(inputs), targets) / accumulate).backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
        with session.averaged_parameters(model):
            return flat(model), seen
