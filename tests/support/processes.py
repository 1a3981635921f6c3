"""Real worker processes on loopback: start some, wait for all, show what they said where one failed."""

from __future__ import annotations

import gc
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.forked_programs import preloaded

TESTS = Path(__file__).parents[1]


SOON_SECONDS = 20  # of a busy machine: less than any patience, and than the processes of tests last
watched = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs file descriptors of processes (Linux)")


def free_port() -> int:
    """A port for a server that starts later: none that kernels hand out by themselves, to whoever asks meanwhile."""
    while True:
        port = secrets.choice(range(20_000, 32_000))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def of_this_checkout() -> dict[str, str]:
    """The environment of a `python -m gossamer`: this source, after what the suite puts before every process."""
    paths = filter(None, [os.environ.get("PYTHONPATH"), str(TESTS.parent / "src")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(
            [*filter(None, [os.environ.get("PYTHONPATH")]), str(TESTS), str(TESTS.parent / "src")]
        ),
        "PYTHONWARNINGS": "error::FutureWarning",
        "GOSSAMER_QUIET": "1",  # what they say is the test's
    }


def run_workers(
    arguments: Sequence[str],
    world: int,
    *,
    extra: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    preload: Sequence[str] = (),
    timeout_seconds: float = 200,
) -> list[subprocess.CompletedProcess[str]]:
    """Run `python ARGUMENTS` once per rank; returns what each did, by rank. None outlives the call.

    preload: modules that all ranks import; where they are forks of one process, it imports them once.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder, preloaded(*preload):
        logs = [open(Path(folder) / str(rank), "w+") for rank in range(world)]  # noqa: SIM115  # closed below
        workers = [
            subprocess.Popen(
                [*prefix, sys.executable, *arguments],
                env=environment(rank, world, port) | dict(extra or {}),
                stdout=logs[rank],
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            codes = [worker.wait(timeout_seconds) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        said = []
        for log in logs:
            log.seek(0)
            said.append(log.read())
            log.close()
    return [subprocess.CompletedProcess(list(arguments), code, text) for code, text in zip(codes, said, strict=True)]


def succeed(arguments: Sequence[str], world: int, **options: Any) -> list[str]:
    """The same, for workers that must all end well; returns what they printed."""
    results = run_workers(arguments, world, **options)
    failed = [f"rank {rank} ended with {r.returncode}:\n{r.stdout}" for rank, r in enumerate(results) if r.returncode]
    assert not failed, "\n".join(failed)
    return [result.stdout for result in results]


def per_rank(commands: Sequence[Sequence[str]]) -> list[str]:
    """Arguments for run_workers with which rank r becomes commands[r], a program and its arguments."""
    become = "import json, os, sys; mine = json.loads(sys.argv[1])[int(os.environ['RANK'])]; os.execv(mine[0], mine)"
    return ["-c", become, json.dumps([list(command) for command in commands])]


@contextmanager
def engine_files_left_open() -> Iterator[None]:
    """For a launcher in this process: the engine leaves its workers' output files to the garbage collector."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


def eventually(condition: Callable[[], bool], seconds: float = SOON_SECONDS) -> bool:
    """Whether it comes to hold, for what happens soon and tells nobody; the time is a busy machine's."""
    deadline = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return held


def has_ended(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has taken notice yet (Linux)."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def all_end_soon(opened: Iterable[int], seconds: float = SOON_SECONDS) -> bool:
    """Whether these processes end in time; a file descriptor of a process is readable once it has ended. Closes them.

    For tests that are `watched`.
    """
    deadline = time.monotonic() + seconds
    ended = []
    for file in opened:
        ended.append(bool(select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]))
        os.close(file)
    return all(ended)


def findings(text: str) -> list[dict[str, Any]]:
    """What a worker said in lines such as `said {"seconds": 1.5}`."""
    return [json.loads(line.removeprefix("said ")) for line in text.splitlines() if line.startswith("said ")]
