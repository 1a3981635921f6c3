"""Bytes as the kernel counts them, in a network namespace of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.paths import SUPPORT
from support.processes import succeed

from gossamer.events import Attached, StepEnded
from gossamer.observe.event_log import Recorder
from gossamer.observe.record import merge, read_ranks

needs_namespaces = pytest.mark.skipif(
    shutil.which("ip") is None or os.geteuid() != 0,
    reason="network namespaces need root and the ip command (Debian: iproute2)",
)


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"gossamer-test-{uuid.uuid4().hex[:8]}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@needs_namespaces
@pytest.mark.namespaces
@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 3])
def test_promise_19_accounted_bytes_are_the_interfaces(namespace: str, world: int) -> None:
    succeed(
        [str(SUPPORT / "worker_checks.py"), "bytes_on_the_interface"],
        world,
        prefix=["ip", "netns", "exec", namespace],
    )


# -- bytes counted by a record -----------------------------------------------------------------------------------------


def recorded(directory: Path, counter: list[int] | None, steps: int) -> None:
    directory.mkdir()
    recorder = Recorder(directory, 0, interface_bytes=None if counter is None else iter(counter).__next__)
    recorder(Attached(recipe="Dense()", layouts=(), parameters=1, buffer_bytes=0, control_bytes=0, rank=0, world=1))
    for step in range(1, steps + 1):
        recorder(StepEnded(step=step, seconds=0.1, bytes_sent=40))
    recorder.close()


def test_bytes_are_counted_from_the_end_of_the_first_step_to_that_of_the_last(tmp_path: Path) -> None:
    recorded(tmp_path / "a", [1000, 1050, 1120], 3)  # what went before, such as the first parameters, is not a step's
    (rank,) = read_ranks(tmp_path / "a")
    assert rank.interface_bytes == 60
    other = replace(rank, rank=1, interface_bytes=100.0)
    assert merge([rank, other])["bytes_sent_per_step"] == {"accounted": 40, "interface": 80}
    assert merge([rank, replace(rank, interface_bytes=None)])["bytes_sent_per_step"]["interface"] is None


def test_without_a_counter_or_a_second_step_nothing_is_known(tmp_path: Path) -> None:
    recorded(tmp_path / "a", None, 3)
    recorded(tmp_path / "b", [1000], 1)
    assert [read_ranks(tmp_path / name)[0].interface_bytes for name in "ab"] == [None, None]


def test_the_network_is_in_the_record(tmp_path: Path) -> None:
    recorded(tmp_path / "a", None, 1)
    ranks = read_ranks(tmp_path / "a")
    assert merge(ranks)["network"] is merge(ranks)["emulation"] is None
    assert "lab" not in merge(ranks)
    told = {"network": "1gbit", "emulation": "kernel", "lab": {"mtu": 1500, "cpu_share": None}}
    assert merge(ranks, told).items() >= told.items()
