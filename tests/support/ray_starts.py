"""Clusters of Ray on a busy machine: a raylet that ended while it started is started again."""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

ATTEMPTS = 8
REGISTRATION_SECONDS = 60  # Ray waits 30 s; a raylet waits 15 s for each of three files of its helpers
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_worker_niceness": "0",  # 15 by default
}


@contextmanager
def raylets(count: int, cores: int = 1) -> Iterator[str]:
    """Start a cluster of `count` raylets with `cores` each, which ends with the block. Yields its address."""
    from ray._private import services
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setattr(services, "get_node", _patient(services.get_node))
        cluster = Cluster()
        try:
            for number in range(count):
                options: dict[str, Any] = {} if number else {"include_dashboard": False}
                start(lambda: cluster.add_node(num_cpus=cores, object_store_memory=80_000_000, **options))  # noqa: B023
            yield cluster.address
        finally:
            cluster.shutdown()


def start(node: Callable[[], object]) -> None:
    """Start a node, up to ATTEMPTS times: no option of Ray extends the 15 s after which a raylet ends by itself."""
    for attempt in range(ATTEMPTS):
        before = _children()
        try:
            node()
            return
        except Exception:
            if attempt == ATTEMPTS - 1:
                raise
        for process in _children() - before:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with warnings.catch_warnings():  # of processes that Ray does not wait for
            warnings.simplefilter("ignore")
            gc.collect()


def _children() -> set[int]:
    tasks = Path("/proc/self/task").iterdir()
    return {int(process) for task in tasks for process in (task / "children").read_text().split()}


def _patient(ask: Callable[..., Any]) -> Callable[..., Any]:
    """A question for a raylet, repeated until it is registered."""

    def registered(*arguments: Any) -> Any:
        for _ in range(5 * REGISTRATION_SECONDS):
            with suppress(RuntimeError):
                return ask(*arguments)
            threading.Event().wait(0.2)
        return ask(*arguments)

    return registered
