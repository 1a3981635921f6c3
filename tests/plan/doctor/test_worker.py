"""Doctor workers, started by hand, that measure each other."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from support.processes import SOON_SECONDS, per_rank, run_workers

from gossamer.base.host_port import LOOPBACK
from gossamer.comm.network import read_network
from gossamer.plan import doctor
from gossamer.plan.doctor import PairReport, read_report, verdict, worker
from gossamer.plan.doctor.ping_link import PingListener
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


class Texts:
    """A rendezvous store that threads share."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._changed = threading.Condition()

    def pin(self, topic: str, text: str) -> None:
        with self._changed:
            self._texts[topic] = text
            self._changed.notify_all()

    def read(self, topic: str, seconds: float) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: topic in self._texts, SOON_SECONDS)
            return self._texts[topic]


def test_an_address_of_another_machine_is_a_problem_of_this_pair_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's address leads rank 0 to another machine, as addresses of container networks do."""
    monkeypatch.setattr(worker, "CALL_SECONDS", 0.1)
    token = b"sixteen letters!"
    store = Texts()
    with ExitStack() as listeners:
        first, second, other = (listeners.enter_context(closing(PingListener(LOOPBACK, token))) for _ in range(3))

        def measure(rank: int) -> list[PairReport]:
            probe = worker.Probe(
                rank=rank,
                store=store,  # type: ignore[arg-type]
                listener=(first, second)[rank],
                token=token,
                addresses=[(LOOPBACK, first.port), (LOOPBACK, other.port)],
                seconds=0.01,
            )
            return probe.measure([(0, 1)])

        with ThreadPoolExecutor(2) as ranks:
            (found,), (found_there,) = ranks.map(measure, range(2))
    assert found == found_there
    assert [problem.split(" (")[0] for problem in found.problems] == ["rank 0 reached 127.0.0.1, but not rank 1 there"]
    assert found.median_round_trip_seconds is not None  # of the connection that rank 1 opened


@pytest.mark.processes
def test_a_world_of_one_has_no_pairs(tmp_path: Path) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    (ended,) = run_workers([WORKER, str(tmp_path / "report.json"), "--seconds=1"], 1, extra={**os.environ, **alone})
    assert ended.returncode == 1
    assert "no pairs to measure" in ended.stdout
