"""What an exchange needed is given back once it is over, without waiting for the garbage collector, which counts
objects and knows nothing of the tensors that they hold."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from support.elastic_groups import Loss
from support.elastic_training import check_run
from support.nightly import nightly

from gossamer.comm.elastic.transport import ElasticTransport
from gossamer.comm.runtime.transaction import Transaction
from gossamer.errors import PeerLost
from gossamer.train.engine.bucket_reduction import PendingReduction

LOSS = Loss(victim=1, op=9, answered=False, deaf=frozenset())


def left_by(train: Callable[[], object], kind: type[object] = PendingReduction) -> int:
    """How many of a kind only the collector would find: exchanges, or errors with the frames that they came through."""
    gc.collect()
    gc.freeze()  # what is there before is not counted
    gc.disable()
    try:
        train()
        return sum(type(each) is kind for each in gc.get_objects())
    finally:
        gc.enable()


@pytest.mark.parametrize("recipe", ["Dense()", *nightly("TopK(0.1)")])
def test_no_exchange_outlives_its_step(recipe: str) -> None:
    assert left_by(lambda: check_run(recipe, 3)) == 0


@pytest.mark.parametrize("recipe", ["Dense()", *nightly("TopK(0.1)")])
def test_no_error_outlives_the_exchange_that_it_broke(recipe: str) -> None:
    assert left_by(lambda: check_run(recipe, 3, [LOSS]), PeerLost) == 0


def test_a_transaction_that_keeps_its_parts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Transaction.run

    def run(self: Transaction, part: Callable[[], Any], *, last: bool = False) -> Any:
        result = original(self, part, last=last)
        if last:
            self._parts.append(part)
        return result

    monkeypatch.setattr(Transaction, "run", run)
    assert left_by(lambda: check_run("Dense()", 3)) > 0


def test_an_error_that_knows_its_own_frame_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ElasticTransport._try

    def attempt(self: ElasticTransport, call: Callable[[], Any]) -> Any:
        kept: list[BaseException] = []

        def noted() -> Any:
            try:
                return call()
            except Exception as error:
                kept.append(error)
                raise

        return original(self, noted)

    monkeypatch.setattr(ElasticTransport, "_try", attempt)
    runs = (left_by(lambda: check_run("Dense()", 3, [LOSS]), PeerLost) for _ in range(20))
    assert any(runs)  # now and then the survivors notice the loss between two operations
