"""Emulated host: a process enters its network namespace, and only if it has one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.base.run_files import NETWORK_NAMESPACE
from gossamer.comm.environment.emulated_host import enter_host
from gossamer.errors import ConnectError

OWN = Path("/proc/self/ns/net")
ENTERED = f"""
import os, threading
from gossamer.comm.environment.emulated_host import enter_host
os.environ[{NETWORK_NAMESPACE!r}] = "/proc/%d/ns/net" % {{pid}}
enter_host()
networks = [os.readlink("/proc/thread-self/ns/net")]
thread = threading.Thread(target=lambda: networks.append(os.readlink("/proc/thread-self/ns/net")))
thread.start()
thread.join()
print(*networks)
"""


def test_a_process_without_an_emulated_host_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NETWORK_NAMESPACE, raising=False)
    before = os.readlink(OWN)
    enter_host()
    assert os.readlink(OWN) == before


def test_a_missing_host_is_refused_with_the_command_that_makes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(NETWORK_NAMESPACE, str(tmp_path / "gone"))
    with pytest.raises(ConnectError, match=r"cannot enter its emulated host.*gossamer run\s+--network"):
        enter_host()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: makes a network namespace")
def test_a_process_and_the_threads_that_it_starts_are_on_its_host() -> None:
    with subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(b"x\n")
        holder.stdin.flush()
        holder.stdout.readline()  # now `cat` runs inside the namespace
        network = os.readlink(f"/proc/{holder.pid}/ns/net")
        found = subprocess.run(
            [sys.executable, "-c", ENTERED.format(pid=holder.pid)], capture_output=True, text=True, check=True
        )
        holder.stdin.close()
    assert network != os.readlink(OWN)
    assert found.stdout.split() == [network, network]
