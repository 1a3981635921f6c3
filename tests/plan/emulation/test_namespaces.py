"""Network namespaces: an owner that is killed leaves nothing, at the latest when the next one begins."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import eventually
from support.testbed_traffic import inhabitants, left_by, line

from gossamer.comm.network import read_network
from gossamer.plan.emulation import EmulatedNetwork, namespaces, plan
from gossamer.plan.emulation.capabilities import reentering
from gossamer.plan.emulation.namespaces import DIRECTORY, new_tag, remove_stale, sent_bytes, stale, start_ticks

LAB = plan(read_network("100mbit,1ms", 2))
needs_lab = pytest.mark.skipif(
    LAB.emulation == "paced" or LAB.reenters, reason=LAB.reason or "network namespaces need root"
)

OWNER = """
import sys
from gossamer.plan.emulation import EmulatedNetwork
from gossamer.comm.network import read_network
with EmulatedNetwork(read_network(sys.argv[1], 3)) as lab:
    print(lab.emulation, flush=True)
    sys.stdin.read()
"""


def owner(spec: str, *prefix: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", OWNER, spec], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@needs_lab
@pytest.mark.namespaces
@pytest.mark.processes
@pytest.mark.parametrize("seed", range(5))
def test_a_killed_owner_leaves_no_process_and_the_next_lab_removes_the_rest(seed: int) -> None:
    moment = random.Random(seed).uniform(0, 0.15)
    with owner("100mbit,2ms" if seed % 2 else "100mbit") as process:
        # It takes seconds until the library is there, and tenths until the network is: kill it within those
        assert eventually(lambda: bool(left_by(process.pid)), 60)
        time.sleep(moment)
        process.kill()
    names = left_by(process.pid)
    assert eventually(lambda: not inhabitants(names))
    with EmulatedNetwork(read_network("1gbit", 2)):
        assert left_by(process.pid) == []


@needs_lab
@pytest.mark.namespaces
@pytest.mark.processes
def test_a_request_to_stop_is_an_orderly_end() -> None:
    with owner("100mbit,2ms") as process:
        assert line(process) == "switch"
        assert len(left_by(process.pid)) == 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM
    assert left_by(process.pid) == []


@needs_lab
@pytest.mark.namespaces
@pytest.mark.processes
def test_the_living_and_strangers_are_left_alone() -> None:
    mine, foreign = f"{new_tag()}-0", f"gossamer-test-{os.getpid()}"
    dead = "gossamer-{}-1-0-0".format(Path("/proc/sys/kernel/pid_max").read_text().strip())
    try:
        for name in (mine, foreign, dead):
            subprocess.run(["ip", "netns", "add", name], check=True)
        assert dead in stale()
        assert dead in remove_stale()
        assert {mine, foreign} <= {path.name for path in DIRECTORY.iterdir()}
        assert not (DIRECTORY / dead).exists()
    finally:
        for name in (mine, foreign):
            subprocess.run(["ip", "netns", "delete", name], check=True)


def test_a_process_number_that_was_given_again_is_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "DIRECTORY", tmp_path)
    pid, start = os.getpid(), start_ticks(os.getpid())
    for name in (f"gossamer-{pid}-{start:x}-0-1", f"gossamer-{pid}-{start - 1:x}-0-bridge", "gossamer-1-x-0-1", "n1"):
        (tmp_path / name).touch()
    assert list(stale()) == [f"gossamer-{pid}-{start - 1:x}-0-bridge"]


UNPRIVILEGED = ("setpriv", "--inh-caps=-sys_admin,-net_admin", "--bounding-set=-sys_admin,-net_admin")
may_enter = (
    not LAB.reason
    and shutil.which("setpriv") is not None
    and subprocess.run([*UNPRIVILEGED, *reentering(["true"])], capture_output=True, check=False).returncode == 0
)


@pytest.mark.skipif(not may_enter, reason="user namespaces are not allowed here, or setpriv is missing")
@pytest.mark.namespaces
@pytest.mark.processes
@pytest.mark.parametrize(("spec", "emulation"), [("100mbit", "kernel"), ("100mbit,2ms", "switch")])
def test_without_privileges_it_works_in_a_user_namespace(spec: str, emulation: str) -> None:
    with owner(spec, *UNPRIVILEGED, *reentering([])) as process:
        assert line(process) == emulation
        assert left_by(process.pid) == []  # nobody else sees it
        process.communicate("", timeout=10)
    assert process.returncode == 0


# -- interface counters ------------------------------------------------------------------------------------------------


TABLE = """Inter-|   Receive                 |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:   11      12    0    0    0     0          0         0    13      14    0    0    0     0       0          0
  eth0: 1000      10    0    0    0     0          0         0  5000      20    0    0    0     0       0          0
"""


def test_what_the_host_sent_is_counted_in_ip_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev").write_text(TABLE)
    monkeypatch.setattr(namespaces, "COUNTERS", tmp_path / "dev")
    assert sent_bytes(0) == 5000
    assert sent_bytes(14) == 5000 - 14 * 20
