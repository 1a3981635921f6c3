"""Rounds from a strategy: buffered where nobody waits for rounds, and options that mean nothing are refused."""

from __future__ import annotations

import pytest
from support.federated_faults import Buffered
from support.rounds_by_hand import ByHand, rounds_of

from gossamer.algorithms.strategies.federated_rules import FedAvg, FederatedStrategy
from gossamer.errors import RecipeError
from gossamer.federated.server.buffered import BufferedRounds
from gossamer.federated.server.synchronous import SynchronousRounds


def test_the_strategy_says_which() -> None:
    assert isinstance(rounds_of(FedAvg(), 4, round_seconds=3.0), SynchronousRounds)
    assert isinstance(rounds_of(Buffered(), 4, round_seconds=3.0), BufferedRounds)


def test_options_of_the_other_kind_are_refused_unless_they_change_nothing() -> None:
    rounds_of(Buffered(), 4, over_selection=0.0, late="drop")
    with pytest.raises(RecipeError, match=r"over_selection means nothing .* waits for no round"):
        rounds_of(Buffered(), 4, over_selection=0.5)
    with pytest.raises(RecipeError, match=r"late means nothing .* waits for no round"):
        rounds_of(Buffered(), 4, late="count")


@pytest.mark.parametrize("strategy", [FedAvg(), Buffered()])
def test_all_kinds_take_the_same_deadline(strategy: FederatedStrategy) -> None:
    """A round's, or a task's where there is no round that has one."""
    hand = ByHand(rounds_of(strategy, 2, round_seconds=3.0))
    hand.ask(0, 1)
    assert hand.rounds.due == 3.0


def test_the_config_may_tell_rounds_apart() -> None:
    hand = ByHand(rounds_of(FedAvg(fraction=1.0), 1, config=lambda index: {"rate": 0.5**index}))
    hand.ask(0)
    assert hand.tasks[0].config == {"rate": 1.0}
    hand.report(0)
    hand.ask(0)
    assert hand.tasks[0].config == {"rate": 0.5}
