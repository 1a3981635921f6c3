"""The model of benchmarks/goodput.py agrees with formulas, with real servers and with the figures of its page."""

from __future__ import annotations

import sys
from random import Random

import pytest
from support.paths import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS.parent))
from benchmarks import goodput, goodput_model, goodput_real  # found only after the line above
from benchmarks.elastic_runs import Step, WorkerProcess
from benchmarks.goodput_model import AsyncRun, Counted, Failures, RealServer

from gossamer.algorithms.strategies.async_diloco import AsyncDiLoCo

pytestmark = pytest.mark.nightly


def test_without_failures_goodput_is_one() -> None:
    never = Failures(8, 1e12, seconds=1000.0)
    strategy = AsyncDiLoCo(period=10)
    assert goodput_model.restart_of_all(never, 70.0, Random(0)) == 1.0
    assert goodput_model.elastic(never, 70.0, Random(0), period=10) == 1.0
    assert AsyncRun(never, strategy, RealServer(strategy, 8), Random(0)).goodput() == pytest.approx(1.0)


def test_pauses_take_their_share() -> None:
    failures = Failures(100, 2600.0, away_seconds=0.5, seconds=100_000.0)  # one of all in 26 s
    assert goodput_model.restart_of_all(failures, 26.0, Random(0)) == pytest.approx(0.5, abs=0.02)
    assert goodput_model.elastic(failures, 26.0, Random(0)) > 0.6, "returns within the pause do not lengthen it"


@pytest.mark.parametrize("quorum", [1, 2])
def test_counted_merges_are_those_of_real_servers(quorum: int) -> None:
    failures = Failures(6, 300.0, away_seconds=20.0, seconds=3000.0)
    strategy = AsyncDiLoCo(period=10, quorum=quorum, outer_momentum=0.0)
    real, counted = (
        AsyncRun(failures, strategy, kind(strategy, 6), Random(1)).goodput() for kind in (RealServer, Counted)
    )
    assert counted == pytest.approx(real, abs=0.01)
    assert 0.85 < real < 300 / 320


@pytest.mark.parametrize(("learners", "is_elastic"), [(None, False), (None, True), (8, True)])
def test_the_model_gives_the_reported_figures(learners: int | None, is_elastic: bool) -> None:
    found = goodput.as_in_the_paper(goodput.CHIPS, learners, is_elastic)
    assert found == pytest.approx(goodput.PAPER[goodput.CHIPS, learners, is_elastic], abs=0.03)


def process(pid: int, first: int, last: int, begin: float) -> WorkerProcess:
    steps = [Step(n, begin + 0.1 * (n - first), 0.0, 2, 0, 0.0, 0) for n in range(first, last + 1)]
    return WorkerProcess(0, pid, steps, None)


def test_steps_that_a_killed_worker_had_not_sent_are_lost() -> None:
    dense, local, served = goodput_real.ARMS
    victim, successor = process(1, 1, 21, 0.0), process(2, 17, 30, 5.0)
    for arm, lost in ((dense, 0), (local, 5), (served, 5)):
        moments, found = goodput_real.useful([victim, successor], arm, {1: 2.05})
        assert found == lost
        assert len(moments) == 21 - lost + 14
