"""One machine of three cut off without a reset: every rank ends, within seconds of the time that it was given."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from gossamer.comm.network import read_network
from gossamer.plan.emulation import EmulatedNetwork, plan

LAB = plan(read_network("100mbit", 3))
pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.processes,
    pytest.mark.skipif(LAB.emulation == "paced" or LAB.reenters, reason=LAB.reason or "network namespaces need root"),
]

WORLD = 3
UNREACHABLE_SECONDS = 2.0
STEPPING = f"""
import sys, time
from pathlib import Path
import torch
from gossamer.algorithms.collectives import DirectAllReduce
from gossamer.errors import PeerLost
from gossamer.comm.mesh import connect as connecting
from gossamer.comm.mesh.native_mesh import Mesh
from gossamer.comm.mesh.program import mean_program
from gossamer.comm.mesh.stall_watchdog import StallTimeouts

rank, address, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
gathered = 0

def gather(text):
    global gathered
    gathered += 1
    draft = folder / f"draft {{rank}}"
    draft.write_text(text)
    draft.rename(folder / f"{{gathered}} {{rank}}")
    names = [folder / f"{{gathered}} {{each}}" for each in range({WORLD})]
    while not all(name.exists() for name in names):
        time.sleep(0.005)
    return [name.read_text() for name in names]

# Whoever has nothing in flight learns of it from the kernel's keepalive
connecting.IDLE_SECONDS, connecting.PROBE_SECONDS, connecting.PROBES = 1, 1, 2
sockets = connecting.connect(rank, {WORLD}, address, gather)
mesh = Mesh(rank, sockets, StallTimeouts(unreachable_seconds={UNREACHABLE_SECONDS}))
x = torch.zeros(300)
program = mean_program(DirectAllReduce(), 300, torch.float32, rank, tuple(range({WORLD})))
print("steps", flush=True)
try:
    while True:
        mesh.wait(mesh.begin(program, [x.data_ptr() + offset for offset in program.offsets], x))
except PeerLost as lost:
    print(lost, flush=True)
"""


def test_promise_6_every_rank_ends_and_the_one_that_is_cut_off_is_named(tmp_path: Path) -> None:
    with EmulatedNetwork(read_network("100mbit", WORLD)) as lab, ExitStack() as stack:
        ranks = []
        for rank, host in enumerate(lab.hosts):
            command = [*host.prefix, sys.executable, "-c", STEPPING, str(rank), host.address, str(tmp_path)]
            ranks.append(stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
            stack.callback(ranks[-1].kill)
        outputs = [each.stdout for each in ranks if each.stdout is not None]
        assert [each.readline() for each in outputs] == ["steps\n"] * WORLD
        lab.cut(1)
        began = time.monotonic()
        ended = [each.communicate(timeout=40)[0] for each in ranks]
        took = time.monotonic() - began
    assert took < 30, ended  # a busy machine; it takes 5 s where nothing else runs
    assert re.search(r"ranks? [02]", ended[1])
    assert any("rank 1" in ended[rank] for rank in (0, 2))
    lost = ("cannot be reached: its machine has acknowledged no data", "(Connection timed out)", "is gone")
    assert all(any(each in text for each in lost) for text in ended)
