"""Closing exchange: texts of all ranks through a store, or nothing within the time given."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from gossamer.comm.environment import store as rendezvous_store
from gossamer.comm.environment.store import exchange_at_end

PATIENT = 60.0


class Slow:
    """A store that rank 0 serves: once rank 0 has returned, it is gone."""

    def __init__(self) -> None:
        self._inner, self.gone = HashStore(), threading.Event()

    def __getattr__(self, name: str) -> object:
        if self.gone.is_set():
            raise RuntimeError("the connection was closed")
        return getattr(self._inner, name)


def test_every_rank_has_all_texts_also_where_the_store_ends_with_rank_0() -> None:
    store = Slow()

    def rank(number: int) -> list[str] | None:
        found = exchange_at_end(store, "1", number, 4, f"text {number}", PATIENT)  # type: ignore[arg-type]
        if number == 0:
            store.gone.set()
        return found

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(rank, range(4))) == 4 * [[f"text {each}" for each in range(4)]]


def test_a_rank_that_does_not_come_is_not_waited_for() -> None:
    store: Store = HashStore()
    assert exchange_at_end(store, "1", 1, 2, "text", seconds=0.0) is None
    assert exchange_at_end(store, "2", 0, 2, "text", seconds=0.0) is None  # another exchange, whose rank 1 is missing
    assert exchange_at_end(store, "1", 0, 2, "late", seconds=0.0) == ["late", "text"]


def test_a_store_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_store, "GRACE_SECONDS", 0.01)
    answers = threading.Event()

    class Silent:
        def set(self, key: str, text: str) -> None:
            answers.wait(PATIENT)
            raise RuntimeError("the connection was closed")

    assert exchange_at_end(Silent(), "1", 0, 1, "text", seconds=0.0) is None  # type: ignore[arg-type]
    answers.set()


def test_a_store_that_has_ended_is_no_error() -> None:
    store = Slow()
    store.gone.set()
    assert exchange_at_end(store, "1", 0, 1, "text", PATIENT) is None  # type: ignore[arg-type]
