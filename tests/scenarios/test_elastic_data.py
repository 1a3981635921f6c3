"""Shards of elastic groups: within an epoch every sample is used once, but for what was lost with a worker."""

from __future__ import annotations

from random import Random

import pytest
from support.elastic_data import BATCH, check_data
from support.elastic_groups import Join, Loss

from gossamer.comm.elastic.change import Base
from gossamer.comm.elastic.transport import ElasticTransport


@pytest.mark.parametrize("recipe", ["Dense()", "TopK(0.1)"])
def test_nothing_is_lost_without_a_loss(recipe: str) -> None:
    assert check_data(recipe, 3) == 0
    for op in (3, 9, 14):
        assert check_data(recipe, 3, join=Join(op=op), newcomers=1) == 0
        assert check_data(recipe, 2, join=Join(op=op), newcomers=2) == 0


@pytest.mark.parametrize("seed", range(12))
def test_samples_are_used_once_through_losses(seed: int) -> None:
    random = Random(seed)
    losses = [
        Loss(victim=random.randrange(4), op=random.randrange(3, 20), answered=seed % 3 > 0, deaf=frozenset({seed % 4})),
        Loss(victim=random.randrange(4), op=random.randrange(12), answered=seed % 2 > 0, group=4),
    ]
    assert check_data(random.choice(["Dense()", "TopK(0.1)"]), 4, losses) <= 4 * BATCH


@pytest.mark.parametrize("seed", range(12))
def test_samples_are_used_once_where_some_learn_of_newcomers_and_others_do_not(seed: int) -> None:
    random = Random(seed)
    deaf = frozenset(each for each in range(4) if random.random() < 0.4)
    group = random.choice([4, 5, 6, 7])
    loss = Loss(victim=random.randrange(4), op=random.randrange(9), answered=True, deaf=deaf, group=group)
    check_data(random.choice(["Dense()", "TopK(0.1)"]), 3, [loss], Join(op=random.randrange(3, 16)), 2)


def test_twin_members_that_move_from_where_they_are_do_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss right when some had let a newcomer in and others had not."""
    losses = [Loss(victim=1, op=op, answered=True, deaf=frozenset({0, 3}), group=5) for op in range(4, 9)]

    def bases(self: ElasticTransport, group: object) -> object:
        self._base = None
        return told(self, group)  # type: ignore[arg-type]

    told = ElasticTransport._bases
    monkeypatch.setattr(ElasticTransport, "_bases", bases)
    monkeypatch.setattr("support.elastic_groups.SECONDS", 4.0)

    def fails(loss: Loss) -> bool:
        try:
            check_data("Dense()", 4, [loss], Join(op=10, member=1), 1)
        except Exception:
            return True
        return False

    assert any(map(fails, losses))
    assert Base((0,), None).left is False
