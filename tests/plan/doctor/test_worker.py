"""Doctor workers, started by hand, that measure each other."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from support.processes import per_rank, run_workers

from gossamer.comm.network import read_network
from gossamer.plan import doctor
from gossamer.plan.doctor import read_report, verdict
from gossamer.plan.emulation import EmulatedNetwork, plan

WORKER = str(Path(doctor.__file__).with_name("worker.py"))
NETWORK = read_network("100mbit", 3)
PLAN = plan(NETWORK)
needs_lab = pytest.mark.skipif(
    PLAN.emulation == "paced" or PLAN.reenters, reason=PLAN.reason or "network namespaces need root"
)


@needs_lab
@pytest.mark.namespaces
@pytest.mark.processes
def test_hosts_that_cannot_reach_each_other_are_named_and_the_others_measured(tmp_path: Path) -> None:
    commands = []
    with EmulatedNetwork(NETWORK) as lab:
        for host in lab.hosts:
            program, *prefix = host.prefix
            command = [sys.executable, WORKER, str(tmp_path / f"{host.address}.json"), "--seconds=0.1"]
            commands.append([shutil.which(program) or program, *prefix, *command])
        lab.cut(1, 2)
        meeting = {"MASTER_ADDR": lab.hosts[0].address, "GLOO_SOCKET_IFNAME": "eth0", "LOCAL_RANK": "0"}
        ended = run_workers(per_rank(commands), 3, extra={**meeting, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert [each.returncode for each in ended] == [0, 0, 0], ended
    reports = [read_report(path) for path in sorted(tmp_path.glob("*.json"))]
    assert len(reports) == 3
    for report in reports:
        assert report.pairs == reports[0].pairs
        fine, also_fine, broken = report.pairs
        assert (fine.problems, also_fine.problems) == ((), ())
        assert also_fine.back_bits_per_second == pytest.approx(96e6, rel=0.2)
        assert [problem.split(" (")[0] for problem in broken.problems] == [
            "rank 1 cannot reach rank 2 at 10.77.0.3",
            "rank 2 cannot reach rank 1 at 10.77.0.2",
        ]
        assert verdict(report).endswith("pair 1-2 cannot communicate")
        assert report.backend is None
        assert [host.clock_offset_seconds for host in report.hosts] == pytest.approx([0, 0, 0], abs=0.05)


@pytest.mark.processes
def test_a_world_of_one_has_no_pairs(tmp_path: Path) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    (ended,) = run_workers([WORKER, str(tmp_path / "report.json"), "--seconds=1"], 1, extra={**os.environ, **alone})
    assert ended.returncode == 1
    assert "no pairs to measure" in ended.stdout
