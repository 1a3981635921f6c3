"""Fuzz targets: a few inputs each, and the runner."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st
from support.fault_seeds import COUNT, FIRST, block_name, blocks, replayed
from support.fuzz import FuzzTarget, run
from support.fuzz_targets import TARGETS
from support.nightly import nightly


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_accepts_or_refuses_each_input(name: str, tmp_path: Path) -> None:
    """Seconds of inputs; `make fuzz` takes as long as requested."""
    result = run(TARGETS[name](), tmp_path, seconds=1e-9, batch=20)
    assert result.finding is None, result.finding
    assert result.executions >= 20


def test_a_finding_is_reported_and_tried_first_by_the_next_run(tmp_path: Path) -> None:
    def check(value: int) -> None:
        tried.append(value)
        assert value < 1000, "too large"

    tried: list[int] = []
    target = FuzzTarget(st.integers(0, 10**9), check)
    first = run(target, tmp_path, seconds=20, batch=100)
    assert first.finding is not None
    assert "too large" in first.finding
    assert min(value for value in tried if value >= 1000) == 1000  # reduced
    tried.clear()
    assert run(target, tmp_path, seconds=20, batch=100).finding is not None
    assert tried[0] == 1000


# -- Fault seeds: which ones a run goes through, and how a failure says to see it again --------------------------------


def test_a_few_seeds_unless_the_environment_asks_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COUNT, raising=False)
    monkeypatch.delenv(FIRST, raising=False)
    assert blocks(25) == [range(25)]
    assert blocks(30) == [range(25), *nightly(range(25, 30))]
    monkeypatch.setenv(COUNT, "10000")
    assert sorted(seed for block in blocks(25) for seed in block) == list(range(10_000))
    monkeypatch.setenv(FIRST, "7")
    monkeypatch.setenv(COUNT, "1")
    assert blocks(25) == [range(7, 8)]
    assert block_name(range(7, 8)) == "seeds 7 to 7"


def test_a_failure_explains_how_to_see_it_again() -> None:
    with pytest.raises(AssertionError) as failed, replayed(41, "some_test and sync"):
        raise AssertionError
    assert failed.value.__notes__ == [f"Again: {FIRST}=41 {COUNT}=1 pytest tests -k 'some_test and sync'"]
