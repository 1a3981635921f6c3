"""Epochs of an elastic group whose shards follow it: who used which sample, and which were lost with a worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from support.elastic_groups import ElasticRun, Join, Killed, Loss
from support.elastic_training import again, check_alike, told
from support.sessions import sgd
from support.virtual_workers import Worker, network
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from gossamer.train.world_state import WorldState

SAMPLES, BATCH, EPOCHS = 46, 2, 2


@dataclass
class Diary:
    """What became of samples, as (epoch, sample)."""

    used: list[tuple[int, int]] = field(default_factory=list)
    unfinished: list[tuple[int, int]] = field(default_factory=list)  # those of a step that this worker did not finish
    steps: int = 0


def train_epochs(recipe: Any, diaries: dict[int, Diary], worker: Worker) -> Any:
    """Each sample's number is its input, too."""
    diary = diaries.setdefault(worker.rank, Diary())
    place = worker.rank, max(worker.world, worker.rank + 1)
    world = WorldState(rank=place[0], size=place[1], local_rank=0, device=torch.device("cpu"))
    shard = world.shard(range(SAMPLES))
    model, optimizer, session = worker.start(network(worker.rank), sgd, recipe, world=world)
    loader = session.track(DataLoader(range(SAMPLES), batch_size=BATCH, sampler=shard))
    if shard.epoch == EPOCHS - 1 and shard._at.over:
        raise Killed  # a newcomer for whom nothing is left: it leaves
    while shard.epoch < EPOCHS - 1 or not shard._at.over:
        with session.epoch():
            for batch in loader:
                diary.unfinished = [(shard.epoch, int(sample)) for sample in batch]
                optimizer.zero_grad()
                inputs = torch.sin(batch.double()[:, None] * torch.arange(1, 7))
                session.set_batch_weight(len(batch))
                mse_loss(model(inputs), inputs[:, :3]).backward()
                optimizer.step()
                diary.used += diary.unfinished
                diary.unfinished, diary.steps = [], diary.steps + 1
    return told(session, deals=[shard._at.deal.drawn])


def check_data(
    recipe: Any,
    world: int,
    losses: Sequence[Loss] = (),
    join: Join | None = None,
    newcomers: int = 0,
    *,
    passes: int = 0,
) -> int:
    """Every sample was used once in each epoch, except those that the lost workers had and did not finish: a loss may
    come before or after the others have their gradients. Returns how many were not used.

    passes: with unequal shares, of a worker in one step, at most. The samples of a lost worker's last step are then not
        known exactly.
    """
    diaries: dict[int, Diary] = {}
    with again(recipe, world, list(losses), join, newcomers):
        results = ElasticRun(world, losses, newcomers, join)(partial(train_epochs, recipe, diaries))
        here = [each for each in results if each is not None]
        check_alike(here, here[0].steps)
        used = Counter(each for diary in diaries.values() for each in diary.used)
        twice = sorted(each for each, count in used.items() if count > 1)
        assert not twice, f"used twice: {twice}"
        missing = {(epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES)} - set(used)
        lost = {each for number, diary in diaries.items() if results[number] is None for each in diary.unfinished}
        dead = sum(each is None for each in results[:world])
        assert len(missing - lost) <= BATCH * passes * dead, f"used by nobody: {sorted(missing - lost)}"
    return len(missing)
