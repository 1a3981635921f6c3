"""Peers on one job: what a row shows, what a page says of an arm that did not train, and seconds after a kill."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import psutil
import pytest
from benchmarks import peers_kills
from benchmarks.elastic_runs import Step, WorkerProcess
from benchmarks.peers import DDP, Outcome, measure, table
from benchmarks.peers_kills import VICTIM, recovery

from gossamer.comm.network import read_network
from gossamer.plan.emulation import plan

pytestmark = pytest.mark.nightly
OTHER = "Gossamer, Float4()"
PLAN = plan(read_network("100mbit,1ms", 2))


def outcome(losses: Sequence[float], steps: int = 100) -> Outcome:
    curve = [(10.0 * (place + 1), steps, loss) for place, loss in enumerate(losses)]
    return Outcome(seconds=10.0 * len(losses), steps=steps, bytes=1000 * steps, memory=2_000_000, curve=curve)


def cells(text: str, arm: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {arm} |")]
    return [each.strip() for each in line.strip("|").split("|")]


def test_a_row_has_medians_with_the_least_and_the_most() -> None:
    text = table({DDP: [outcome([4.0, 2.0], 50), outcome([4.0, 2.2], 100), outcome([4.0, 2.1], 80)]})
    assert cells(text, DDP)[1:4] == ["250 ms (200 to 400)", "80 (50 to 100)", "2.100 (2.000 to 2.200)"]
    assert cells(text, DDP)[5:] == ["1.0 kB", "2.0 MB"]


def test_the_seconds_to_the_loss_of_ddp_are_interpolated() -> None:
    text = table({DDP: [outcome([4.0, 2.0])], OTHER: [outcome([3.0, 1.0])]})
    assert cells(text, DDP)[4] == "20"
    assert cells(text, OTHER)[4] == "15"


def test_an_arm_of_which_one_round_stays_above_the_loss_of_ddp_has_not_reached_it() -> None:
    text = table({DDP: [outcome([4.0, 2.0])] * 2, OTHER: [outcome([3.0, 1.0]), outcome([3.0, 2.5])]})
    assert cells(text, OTHER)[4] == "not reached"


def test_an_arm_that_did_not_train_is_named_with_its_reason() -> None:
    text = table({DDP: ["ImportError: no torch"], OTHER: [outcome([3.0, 1.0])]})
    assert cells(text, OTHER)[4] == "not reached"
    assert text.endswith(f"Did not train. {DDP}: ImportError: no torch.")


@pytest.mark.namespaces
@pytest.mark.skipif(PLAN.emulation == "paced" or PLAN.reenters, reason=PLAN.reason or "network namespaces need root")
def test_an_arm_trains_on_emulated_hosts_and_leaves_no_process() -> None:
    arguments = argparse.Namespace(network="100mbit,1ms", workers=2, size="tiny", batch=2, seconds=1.0, verbose=True)
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    found = measure(DDP, arguments)
    assert not isinstance(found, str), found
    assert found["steps"] > 0
    assert found["bytes"] > 4 * 56_864 * found["steps"]  # a worker of two sends its gradients and receives the other's
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= before


# -- seconds after a kill: worker 1 of 3 is killed at 10.5 -------------------------------------------------------------


def process(place: int, *moments: float, pid: int = 1) -> WorkerProcess:
    steps = [Step(number + 1, moment, 1.0, 3, place, 0.0, 0) for number, moment in enumerate(moments)]
    return WorkerProcess(place, pid, steps, None)


VICTIM_PROCESS = process(VICTIM, 9.0, 10.0)


def test_a_survivor_counts_from_the_first_step_that_began_after_the_kill() -> None:
    """The step in which the kill came may end without the lost worker."""
    others = [process(0, 9.0, 10.0, 11.0, 14.5, 15.5), process(2, 9.0, 10.0, 11.0, 13.5, 14.5)]
    found = recovery([VICTIM_PROCESS, *others, process(VICTIM, 17.0, 18.0, pid=2)], 10.5, 3)
    assert found is not None
    assert found.step == 1.0
    assert found.survivors == 4.0
    assert found.pause == 3.5
    assert found.all == 6.5


def test_a_later_pause_of_a_survivor_counts() -> None:
    others = [process(0, 9.0, 10.0, 11.0, 12.0, 13.0), process(2, 8.0, 10.0, 11.0, 12.0, 18.0)]
    found = recovery([VICTIM_PROCESS, *others, process(VICTIM, 13.0, pid=2)], 10.5, 3)
    assert found is not None
    assert (found.survivors, found.pause) == (1.5, 6.0)


def test_processes_that_replace_all_count_from_their_first_step() -> None:
    before = [process(place, 9.0, 10.0) for place in (0, 2)]
    after = [process(place, 20.0 + place, 23.0, pid=2) for place in range(3)]
    found = recovery([VICTIM_PROCESS, *before, *after], 10.5, 3)
    assert found is not None
    assert (found.survivors, found.all, found.pause) == (11.5, 11.5, 12.0)


def test_nothing_is_measured_until_the_replacement_trains() -> None:
    others = [process(place, 9.0, 10.0, 11.0, 12.0, 13.0) for place in (0, 2)]
    assert recovery([VICTIM_PROCESS, *others], 10.5, 3) is None


@pytest.mark.namespaces
@pytest.mark.skipif(PLAN.emulation == "paced" or PLAN.reenters, reason=PLAN.reason or "network namespaces need root")
def test_a_killed_worker_of_an_emulated_host_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_kills, "SETTLE_SECONDS", 1.0)
    arguments = argparse.Namespace(network="100mbit,1ms", workers=3, size="tiny", batch=2, seconds=1.0, verbose=True)
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    found = peers_kills.measure("Gossamer, Int8()", arguments)
    assert not isinstance(found, str), found
    assert found.survivors <= found.all
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= before
