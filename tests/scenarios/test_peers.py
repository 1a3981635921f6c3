"""Peers on one job: what a row shows, and what a page says of an arm that did not train."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import psutil
import pytest
from benchmarks.peers import DDP, Outcome, measure, table

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
