"""Shards of elastic groups: within an epoch every sample is used once, also if workers are lost."""

from __future__ import annotations

import threading
from random import Random
from typing import Any

import pytest
import torch
from support import elastic_data
from support.elastic_data import BATCH, check_data
from support.elastic_groups import ElasticRun, Join, Loss
from support.nightly import nightly
from support.virtual_workers import Worker
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.utils.data import DataLoader

from gossamer.comm.elastic.change import Base
from gossamer.comm.elastic.transport import ElasticTransport
from gossamer.train.synchronizers import speed_balance
from gossamer.train.world_state import WorldState

every_seed = pytest.mark.parametrize("seed", [*range(6), *nightly(*range(6, 12))])


@pytest.mark.parametrize("recipe", ["TopK(0.1)", "Gossip() + Ring()", *nightly("Dense()")])
def test_nothing_is_lost_without_a_loss(recipe: str) -> None:
    assert check_data(recipe, 3) == 0
    for op, newcomers in ((3, 1), (9, 2), (14, 1)):
        assert check_data(recipe, 4 - newcomers, join=Join(op=op), newcomers=newcomers) == 0


def uses_in_gradients(worker: Worker, uses: dict[int, Tensor]) -> None:
    """Train an epoch of 48 samples. uses: how often each was in a mean gradient, by rank."""
    world = WorldState(rank=worker.rank, size=worker.world, local_rank=0, device=torch.device("cpu"))
    shard = world.shard(range(48))
    model = nn.Linear(48, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    session = worker.attach(model, optimizer, "Dense()", world=world)
    uses[worker.rank] = torch.zeros(48, dtype=torch.int64)
    with session.epoch():
        for batch in session.track(DataLoader(range(48), batch_size=2, sampler=shard)):
            optimizer.zero_grad()
            model(one_hot(batch, 48).float()).sum().backward()
            assert model.weight.grad is not None
            uses[worker.rank] += model.weight.grad.flatten() != 0
            optimizer.step()
    session.close()


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("op", [3, 4, 6, 9, *nightly(*range(10, 16))])
def test_each_sample_is_in_one_gradient_although_a_worker_is_lost(op: int, answered: bool) -> None:
    """The others train on the last batch of a worker that is lost before they have its gradients."""
    uses: dict[int, Tensor] = {}
    ElasticRun(3, [Loss(victim=1, op=op, answered=answered)])(lambda worker: uses_in_gradients(worker, uses))
    assert uses[0].tolist() == uses[2].tolist() == [1] * 48


@pytest.mark.parametrize(
    ("seed", "recipes"),
    [
        *((seed, ["Dense()", "TopK(0.1)"]) for seed in range(6)),
        *((seed, ["Gossip() + Ring()"]) for seed in range(3)),
        *nightly(*((seed, ["Dense()", "TopK(0.1)"]) for seed in range(6, 12))),
    ],
)
def test_samples_are_used_once_through_losses(seed: int, recipes: list[str]) -> None:
    random = Random(seed)
    losses = [
        Loss(victim=random.randrange(4), op=random.randrange(3, 20), answered=seed % 3 > 0, deaf=frozenset({seed % 4})),
        Loss(victim=random.randrange(4), op=random.randrange(12), answered=seed % 2 > 0, group=4),
    ]
    assert check_data(random.choice(recipes), 4, losses) <= 4 * BATCH


@every_seed
def test_samples_are_used_once_where_some_learn_of_newcomers_and_others_do_not(seed: int) -> None:
    random = Random(seed)
    deaf = frozenset(each for each in range(4) if random.random() < 0.4)
    group = random.choice([4, 5, 6, 7])
    loss = Loss(victim=random.randrange(4), op=random.randrange(9), answered=True, deaf=deaf, group=group)
    check_data(random.choice(["Dense()", "TopK(0.1)"]), 3, [loss], Join(op=random.randrange(3, 16)), 2)


@pytest.fixture
def divisions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shares by which data were divided. Worker r needs r + 1 virtual seconds between two calls of the clock."""
    pace, shares = threading.local(), list[tuple[int, ...]]()
    train, divide = elastic_data.train_epochs, WorldState.divide

    def now() -> float:
        pace.now = getattr(pace, "now", 0.0) + pace.seconds
        return float(pace.now)

    def paced(recipe: Any, diaries: Any, worker: Any) -> Any:
        pace.seconds = worker.rank + 1.0
        return train(recipe, diaries, worker)

    def divided(self: WorldState, new: Any, parts: Any, rank: int) -> None:
        shares.append(tuple(new))
        divide(self, new, parts, rank)

    monkeypatch.setattr(elastic_data, "train_epochs", paced)
    monkeypatch.setattr(elastic_data, "SAMPLES", 150)
    monkeypatch.setattr(WorldState, "divide", divided)
    monkeypatch.setattr(speed_balance, "now", now)
    monkeypatch.setattr(speed_balance, "REVIEW_STEPS", 1)
    monkeypatch.setattr(speed_balance, "WARM_UP", 0)
    return shares


BALANCED = "EveryStep(global_batch=24, batch=2, balance=True)"


@pytest.mark.parametrize("op", [8, 11, 15])
def test_newcomers_join_while_shares_follow_the_speed(op: int, divisions: list[tuple[int, ...]]) -> None:
    assert check_data(BALANCED, 3, join=Join(op=op), newcomers=1) == 0
    assert {len(each) for each in divisions} == {3, 4}


@every_seed
def test_losses_while_shares_follow_the_speed(seed: int, divisions: list[tuple[int, ...]]) -> None:
    random = Random(seed)
    deaf = frozenset({seed % 4})
    loss = Loss(victim=random.randrange(4), op=random.randrange(5, 40), answered=seed % 3 > 0, deaf=deaf)
    check_data(BALANCED, 4, [loss], passes=9)
    assert divisions


@pytest.mark.parametrize("op", range(5, 10))
def test_a_loss_while_the_data_are_divided(op: int, divisions: list[tuple[int, ...]]) -> None:
    """One of these operations is the exchange of positions, which is then repeated without the lost worker."""
    check_data(BALANCED, 4, [Loss(victim=2, op=op)], passes=9)
    assert divisions


def test_mutant_members_that_move_from_where_they_are_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss right when some had let a newcomer in and others had not."""
    losses = [Loss(victim=1, op=op, answered=True, deaf=frozenset({0, 3}), group=5) for op in range(4, 9)]

    def own_base(self: ElasticTransport) -> object:
        self._base = None
        return remembered(self)

    remembered = ElasticTransport._own_base
    monkeypatch.setattr(ElasticTransport, "_own_base", own_base)
    monkeypatch.setattr("support.elastic_groups.SECONDS", 4.0)

    def fails(loss: Loss) -> bool:
        try:
            check_data("Dense()", 4, [loss], Join(op=10, member=1), 1)
        except Exception:
            return True
        return False

    assert any(map(fails, losses))
    assert Base((0,), None).left is False
