"""Small scripts for simulated jobs, written into a folder, and a clock that needs no measuring."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from gossamer.algorithms.recipes.recipe import Recipe
from gossamer.plan.simulate import JobProgress, SimulatedJob, StepTimes

TRAINING = """
    import random, sys
    import numpy, torch
    from torch import nn
    import gossamer

    steps = int(sys.argv[1])
    world = gossamer.init()
    torch.manual_seed(7 + world.rank)
    model = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 1)).double()
    for parameter in model.parameters():
        parameter.data = torch.randint(-2, 3, parameter.shape).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    session = gossamer.attach(model, optimizer)
    torch.manual_seed(100 + world.rank)
    random.seed(world.rank)
    numpy.random.seed(world.rank)
    for step in range(steps):
        inputs = torch.randint(-2, 3, (4, 5)).double() + random.randint(0, 1) + int(numpy.random.randint(0, 2))
        loss = model(inputs).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss.item())
    session.close()
    if world.is_first:
        print("sums", *(parameter.square().sum().item().hex() for parameter in model.parameters()))
"""


def script(folder: Path, text: str = TRAINING, name: str = "train.py") -> Path:
    file = folder / name
    file.write_text(dedent(text))
    return file


@dataclass
class SteadyClock:
    """Every step takes as long, but for those that begin after a moment."""

    seconds: float = 0.5
    later: float = 0.5
    since: float = float("inf")

    def step(self, recipe: Recipe, at: float, shares: tuple[int, ...] | None = None) -> StepTimes:
        return StepTimes(seconds=self.seconds if at < self.since else self.later)


def simulated(
    file: Path, *arguments: object, recipe: str = "Dense()", workers: int = 2, **options: object
) -> SimulatedJob:
    return SimulatedJob(file, [str(each) for each in arguments], recipe, workers, **{"clock": SteadyClock(), **options})  # type: ignore[arg-type]


def finished(job: SimulatedJob) -> JobProgress:
    """At the script's end."""
    try:
        return job.advance()
    finally:
        job.close()
