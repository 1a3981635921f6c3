"""Coordinator and members in virtual time, on bad networks: invariants of views and of what is completed in them."""

from __future__ import annotations

import pytest
from benchmarks import membership_seeds
from benchmarks.membership_invariants import INVARIANTS, TWINS, caught, check
from benchmarks.membership_runs import ElasticRun
from support.fault_seeds import block_name, blocks, replayed


@pytest.mark.parametrize("block", blocks(200), ids=block_name)
def test_promise_20_views_and_histories_are_one(block: range) -> None:
    for seed in block:
        with replayed(seed, "views_and_histories_are_one"):
            check(ElasticRun(seed).go())


@pytest.mark.parametrize("twin", TWINS)
def test_wrong_rules_are_found_out(twin: str) -> None:
    assert any(caught(twin, seed) for seed in range(50))


def test_the_program_names_what_it_went_through(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["membership_seeds", "--seeds", "5", "--twin-seeds", "30"])
    assert membership_seeds.main() == 0
    said = capsys.readouterr().out
    assert "5 seeds from 0 on" in said
    assert all(f"| {name} | 0 |" in said for name in INVARIANTS)
    monkeypatch.setattr("sys.argv", ["membership_seeds", "--seeds", "0", "--twin-seeds", "0"])
    assert membership_seeds.main() == 1


def test_runs_are_the_same_again() -> None:
    first, second = (ElasticRun(457).go() for _ in range(2))
    assert first.notes == second.notes
    assert [each.entries for each in first.processes] == [each.entries for each in second.processes]
    assert first.trace == second.trace
