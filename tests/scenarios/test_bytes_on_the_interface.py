"""Bytes as the kernel counts them, in a network namespace of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator

import pytest
from support.paths import SUPPORT
from support.processes import succeed

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
