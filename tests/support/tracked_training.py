"""Training with a loader, a scheduler and a second optimizer that is stopped and resumed: in a thread, or a process.

Run as a program, with the arguments DIRECTORY STEP, it trains in a job of processes to the end, and saves at step STEP;
it resumes from what is in DIRECTORY, and prints a digest of all parameters.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer.train.checkpoint import digest
from gossamer.train.session.session import Session
from gossamer.train.world_state import WorldState

EPOCHS, BATCHES = 3, 5  # a rank's, in each epoch


def data() -> TensorDataset:
    inputs = torch.randn(80, 8, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


class Training:
    """A model of two parts, each with an optimizer and a scheduler of its own."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model[0].parameters(), 1e-2)
        self.second = torch.optim.AdamW(model[-1].parameters(), 1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 12)
        self.second_scheduler = torch.optim.lr_scheduler.OneCycleLR(self.second, 0.05, total_steps=40)
        self.seen: list[Tensor] = []

    def run(
        self,
        session: Session,
        world: WorldState,
        directory: Path | None,
        saved: int | None,
        *,
        stops: bool = True,
        **options: Any,
    ) -> Tensor:
        """The parameters after the last step, or after step `saved`, where all is saved and training stops."""
        dataset = data()
        loader = session.track(DataLoader(dataset, 8, sampler=world.shard(dataset), **options))
        session.track(scheduler=self.scheduler)
        session.track(second=self.second)
        session.track(second_scheduler=self.second_scheduler)
        mine = session.load(directory) if directory is not None else {}
        for epoch in range(mine.get("epoch", 0), EPOCHS):
            for inputs, targets in loader:
                self.seen.append(inputs)
                cross_entropy(self.model(inputs), targets).backward()
                for optimizer in (self.second, self.optimizer):
                    optimizer.step()
                    optimizer.zero_grad()
                self.scheduler.step()
                self.second_scheduler.step()
                if session.steps == saved:
                    assert directory is not None
                    session.save(directory, epoch=epoch)
                    if stops:
                        return self.parameters()
        return self.parameters()

    def parameters(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])


def main(directory: Path, saved: int) -> None:
    torch.manual_seed(0)
    world = gossamer.init()
    training = Training(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 4)))
    session = gossamer.attach(training.model, training.optimizer)
    training.run(session, world, directory, saved, stops=False, num_workers=2, persistent_workers=True)
    print("digest", digest(training.model.parameters()), session.steps, len(training.seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
