"""Fault seeds: which ones a run goes through, and how a failure says to see it again."""

from __future__ import annotations

import pytest
from support.fault_seeds import COUNT, FIRST, block_name, blocks, replayed


def test_a_few_seeds_unless_the_environment_asks_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COUNT, raising=False)
    monkeypatch.delenv(FIRST, raising=False)
    assert blocks(25) == [range(25)]
    assert blocks(30) == [range(25), range(25, 30)]
    monkeypatch.setenv(COUNT, "10000")
    assert sorted(seed for block in blocks(25) for seed in block) == list(range(10_000))
    monkeypatch.setenv(FIRST, "7")
    monkeypatch.setenv(COUNT, "1")
    assert blocks(25) == [range(7, 8)]
    assert block_name(range(7, 8)) == "seeds 7 to 7"


def test_a_failure_says_how_to_see_it_again() -> None:
    with pytest.raises(AssertionError) as failed, replayed(41, "some_test and sync"):
        raise AssertionError
    assert failed.value.__notes__ == [f"Again: {FIRST}=41 {COUNT}=1 pytest tests -k 'some_test and sync'"]
