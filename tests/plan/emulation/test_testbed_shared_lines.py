"""Shared lines between two sites of an emulated network."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.testbed_traffic import arrived, streams_bits_per_second

from gossamer.comm.network import Host, Network, Path, read_network
from gossamer.plan.emulation import EmulatedNetwork, plan
from gossamer.plan.emulation.namespaces import EmulationError
from gossamer.plan.emulation.tun_switch import Switch

LAB = plan(read_network("100mbit,1ms", 2))
needs_lab = pytest.mark.skipif(
    LAB.emulation == "paced" or LAB.reenters, reason=LAB.reason or "network namespaces need root"
)
pytestmark = [pytest.mark.namespaces, pytest.mark.processes, needs_lab]

RATE = 20e6
ATTEMPTS = 3  # others may use this machine's processors meanwhile, and they can only disturb


def offices(shared: float | None, jitter_seconds: float = 0.0) -> Network:
    hosts = tuple(Host(up_bits_per_second=RATE, down_bits_per_second=RATE, site=site) for site in "nnss")
    path = Path(round_trip_seconds=0.004, jitter_seconds=jitter_seconds, bits_per_second=shared)
    return Network(hosts=hosts, paths={frozenset("ns"): path})


@pytest.fixture(scope="module")
def lab() -> Iterator[EmulatedNetwork]:
    with EmulatedNetwork(offices(RATE)) as running:
        yield running


def check_shared(lab: EmulatedNetwork, attempts: int = ATTEMPTS) -> None:
    """Two streams the same way, each over lines of its own but one: together they are as fast as it."""
    for _ in range(attempts):
        rates = streams_bits_per_second(lab, (0, 2), (1, 3))
        if all(0.25 * RATE < rate < 0.75 * RATE for rate in rates) and abs(sum(rates) - RATE) < 0.1 * RATE:
            return
    raise AssertionError(rates)


def test_two_streams_share_the_line(lab: EmulatedNetwork) -> None:
    assert lab.emulation == "switch"
    check_shared(lab)


def test_without_a_line_between_they_do_not() -> None:
    with EmulatedNetwork(offices(None)) as apart, pytest.raises(AssertionError):
        check_shared(apart, attempts=1)


def test_one_stream_each_way_has_all_of_it(lab: EmulatedNetwork) -> None:
    for _ in range(ATTEMPTS):
        rates = streams_bits_per_second(lab, (0, 2), (3, 1))
        if all(abs(rate - RATE) < 0.1 * RATE for rate in rates):
            return
    raise AssertionError(rates)


def test_jitter_before_a_shared_line_keeps_the_order() -> None:
    with EmulatedNetwork(offices(RATE / 4, jitter_seconds=0.001)) as jittery:
        assert arrived(jittery, 0, 2, 200) == list(range(1, 201))


def test_a_line_that_is_not_there_cannot_be_shared() -> None:
    switch = Switch()
    try:
        assert switch.ask("shared 1e6 1000") == "ok"
        with pytest.raises(EmulationError, match="no such line"):
            switch.ask("through 0 1 1")
        with pytest.raises(EmulationError, match="no such host"):
            switch.ask("through 0 1 0")
        with pytest.raises(EmulationError, match="not understood: shared 1e6"):
            switch.ask("shared 1e6")
        for line in ("shared 0 1000", "shared -1 1000", "shared 1e6 -1", "host /nowhere 1e6 0 1000"):
            with pytest.raises(EmulationError, match="rate above 0"):
                switch.ask(line)
        with pytest.raises(EmulationError, match="no such host"):
            switch.ask("rate 0 1e6 1e6")
        assert [switch.ask("host /nowhere 1e6 1e6 1000"), switch.ask("through 0 0 0")] == ["ok"] * 2
        with pytest.raises(EmulationError, match="hosts come before"):
            switch.ask("host /nowhere 1e6 1e6 1000")
        with pytest.raises(EmulationError, match="no such path"):
            switch.ask("path 0 0 0 0 1")
    finally:
        switch.close()


def test_ctrl_c_at_the_terminal_does_not_end_the_network() -> None:
    """Ctrl-C sends SIGINT to the launcher and all programs of its process group; the workers then save."""
    program = f"""
import os, signal
from {Switch.__module__} import Switch
switch = Switch()
signal.signal(signal.SIGINT, lambda number, frame: None)
os.killpg(0, signal.SIGINT)
print(switch.ask("shared 1e6 1000"), flush=True)
switch.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, start_new_session=True)
    assert (done.stdout, done.stderr) == ("ok\n", "")
