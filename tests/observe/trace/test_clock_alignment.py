from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.virtual_traces import CLOCKS, Rounds, SkewedClock

from gossamer.base.spans.record_format import SpanKind
from gossamer.observe.trace import clock_alignment
from gossamer.observe.trace.clock_alignment import AlignedClock, align, describe, fit
from gossamer.observe.trace.span_files import read_run

LONG = Rounds(pause_seconds=30.0)  # an hour, in which clocks part by a third of a second


def errors(folder: Path, clocks: Sequence[SkewedClock], until: float) -> dict[int, tuple[float, float]]:
    """By rank: by how much its aligned clock is off at most, and by how much it says it may be."""
    processes = read_run(folder)
    aligned = align(processes)
    moments = np.linspace(0.0, until, 50)
    return {
        each.rank: (
            max(abs(aligned[each.clock](clocks[each.rank](t)) - clocks[0](t)) for t in moments),
            aligned[each.clock].error,
        )
        for each in processes
    }


def check_alignment(folder: Path, rounds: Rounds, seed: int) -> None:
    """Within a millisecond at a round trip of twenty; and never off by more than it says, which is about half"""
    until = rounds.record(folder, CLOCKS, seed)
    for off, bound in errors(folder, CLOCKS, until).values():
        assert off < 0.001
        assert off <= bound < 0.016


@pytest.mark.parametrize("rounds", [Rounds(), LONG], ids=["short", "long"])
@pytest.mark.parametrize("seed", range(3))
def test_clocks_agree_within_a_millisecond(tmp_path: Path, rounds: Rounds, seed: int) -> None:
    check_alignment(tmp_path, rounds, seed)


def one_sided(lower: NDArray[np.float64], upper: NDArray[np.float64]) -> AlignedClock:
    """Forgets what the others' answers say: as if messages took no time."""
    return fit(upper - [0.0, 1e-9], upper)


def without_drift(lower: NDArray[np.float64], upper: NDArray[np.float64]) -> AlignedClock:
    return AlignedClock(offset=(lower[:, 1].max() + upper[:, 1].min()) / 2, error=0.01)


@pytest.mark.parametrize(
    ("twin", "rounds"), [(one_sided, Rounds()), (without_drift, LONG)], ids=["one side", "no drift"]
)
def test_a_bound_that_is_ignored_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, twin: object, rounds: Rounds
) -> None:
    monkeypatch.setattr(clock_alignment, "fit", twin)
    with pytest.raises(AssertionError):
        check_alignment(tmp_path, rounds, 0)


def test_a_rank_that_is_always_late_is_within_its_bound(tmp_path: Path) -> None:
    """Nobody ever waits for the other one, so one side is loose; the bound says so."""
    late = (SkewedClock(), SkewedClock(3.0))
    rounds = Rounds(count=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Rounds,
            "_comes",
            lambda self, begins, sender, receiver, random: begins[sender] + (sender == 1) * 0.1 + 0.01,
        )
        until = rounds.record(tmp_path, late)
    off, bound = errors(tmp_path, late, until)[1]
    assert off <= bound


def test_processes_of_one_machine_share_a_clock(tmp_path: Path) -> None:
    """Two ranks on each of two machines: the bounds of both serve either, and the first machine's need none."""
    far = CLOCKS[1]
    clocks = (CLOCKS[0], CLOCKS[0], far, far)
    until = Rounds(machines=(0, 0, 1, 1)).record(tmp_path, clocks)
    found = errors(tmp_path, clocks, until)
    assert found[0] == found[1] == (0.0, 0.0)
    assert found[2] == found[3]
    assert found[2][0] < 0.001
    said = describe(align(read_run(tmp_path)), read_run(tmp_path))
    assert len(said) == 1
    assert said[0].startswith("ranks 2, 3: within ")


def test_a_clock_that_was_set_is_reported() -> None:
    """The bounds of before and after exclude every line: the least violation is chosen, and said."""
    xs = np.arange(20.0)
    jumps = np.where(xs < 10, 0.0, 1.0)
    found = fit(np.stack([xs, jumps - 0.01], 1), np.stack([xs, jumps + 0.01], 1))
    assert found.contradicts > 0.9
    assert found.error >= found.contradicts / 2


def test_without_a_common_operation_wall_clocks_are_compared(tmp_path: Path) -> None:
    Rounds(count=3).record(tmp_path, CLOCKS[:2])
    first, other = read_run(tmp_path)
    processes = [first, replace(other, records=other.of(SpanKind.STEP), wall=first.wall + 2, moment=first.moment)]
    aligned = align(processes)
    assert aligned[other.clock].offset == pytest.approx(2.0)
    assert aligned[other.clock].error == inf
    assert "wall clocks" in describe(aligned, processes)[0]
