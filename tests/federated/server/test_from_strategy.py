"""Rounds from a strategy: buffered where nobody waits for rounds, and options that mean nothing are refused."""

from __future__ import annotations

import pytest
from support.federated_faults import Buffered
from support.rounds_by_hand import rounds_of

from gossamer.errors import RecipeError
from gossamer.federated.server.buffered import BufferedRounds
from gossamer.federated.server.synchronous import SynchronousRounds
from gossamer.strategies.federated import FedAvg


def test_the_strategy_says_which() -> None:
    assert isinstance(rounds_of(FedAvg(), 4, round_seconds=3.0), SynchronousRounds)
    assert isinstance(rounds_of(Buffered(), 4, task_seconds=3.0), BufferedRounds)


def test_options_of_the_other_kind_are_refused_unless_they_change_nothing() -> None:
    rounds_of(Buffered(), 4, over_selection=0.0, late="drop")
    with pytest.raises(RecipeError, match=r"round_seconds means nothing .* waits for no round"):
        rounds_of(Buffered(), 4, round_seconds=3.0)
    with pytest.raises(RecipeError, match="task_seconds means nothing"):
        rounds_of(FedAvg(), 4, task_seconds=3.0)
    with pytest.raises(RecipeError, match="deadline means nothing"):
        rounds_of(FedAvg(), 4, deadline=3.0)
