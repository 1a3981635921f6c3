"""Provisional collectives of a view: all members settle them before the same transaction, also after a loss that some
members notice one transaction later than others."""

from __future__ import annotations

from functools import partial

import pytest
from support import elastic_groups
from support.elastic_groups import ElasticRun, Join, Loss, VirtualGroup
from support.elastic_training import trained

from gossamer.comm.elastic import transport
from gossamer.comm.elastic.transport import ElasticTransport

STEPS = 12
AFTER = 2  # transactions
OPERATIONS = (5, 6)  # each is a step


def settled(monkeypatch: pytest.MonkeyPatch, run: ElasticRun) -> dict[int, set[int]]:
    """By view, the numbers of transactions that its members had completed when they settled."""
    found: dict[int, set[int]] = {}

    class Settling(VirtualGroup):
        done, prices = False, None

        def settle(self) -> None:
            if not self.done:
                own: ElasticTransport = self._members._transports[self._number]
                found.setdefault(self._view.number, set()).add(own._completed)
            self.done = True

    monkeypatch.setattr(elastic_groups, "VirtualGroup", Settling)
    monkeypatch.setattr(transport, "SETTLED_AFTER", AFTER)
    run(partial(trained, "Dense()", steps=STEPS))
    return found


def check_equal(found: dict[int, set[int]]) -> None:
    last = max(found)
    assert last > 2, "no other view was formed"
    assert all(len(each) == 1 for each in found.values()), found


@pytest.mark.parametrize("answered", [False, True])
def test_members_settle_before_the_same_transaction_after_a_loss(
    monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    for op in OPERATIONS:
        loss = Loss(victim=1, op=op, answered=answered, deaf=frozenset({2}) if answered else frozenset())
        check_equal(settled(monkeypatch, ElasticRun(3, loss)))


def test_a_newcomer_settles_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    check_equal(settled(monkeypatch, ElasticRun(2, join=Join(op=4), newcomers=1)))
