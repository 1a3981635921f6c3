from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.command_line import refusal

from gossamer.base.kernels import library
from gossamer.cli import doctor as module
from gossamer.comm.network import read_network
from gossamer.plan.doctor import DoctorReport, HostReport, PairReport
from gossamer.plan.emulation import EmulationPlan, plan

PLAN = plan(read_network("100mbit,20ms", 3))
needs_lab = pytest.mark.skipif(
    PLAN.emulation == "paced" or PLAN.reenters, reason=PLAN.reason or "network namespaces need root"
)
GOSSAMER = [sys.executable, "-m", "gossamer", "doctor"]


def examined(directory: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    ran = subprocess.run(
        [*GOSSAMER, *options, "--json", "found.json"],
        cwd=directory, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [path.name for path in directory.iterdir()] == ["found.json"]
    return ran, json.loads((directory / "found.json").read_text())


@pytest.mark.processes
def test_two_workers_on_this_machine(tmp_path: Path) -> None:
    ran, found = examined(tmp_path, "--seconds", "0.1")
    assert "pair 1 of 1: ranks 0 and 1" in ran.stderr
    assert ran.stdout.splitlines()[-1] == found["verdict"]
    assert found["verdict"].startswith("2 workers on 1 host, ")
    assert (found["workers"], found["network"], found["emulation"], found["backend"]) == (2, None, None, "gloo")
    (pair,) = found["pairs"]
    assert pair["ranks"] == [0, 1]
    assert 0 < pair["minimum_round_trip_seconds"] <= pair["median_round_trip_seconds"] < 1
    assert min(pair["forth_bits_per_second"], pair["back_bits_per_second"]) > 1e6
    assert abs(pair["clock_offset_seconds"]) < 0.5
    assert [host["rank"] for host in found["hosts"]] == [0, 1]
    assert all(host["memory_bytes"] > 1e8 and host["cores"] >= 1 for host in found["hosts"])


@needs_lab
@pytest.mark.nightly
@pytest.mark.namespaces
@pytest.mark.processes
def test_an_emulated_network_is_measured_as_it_was_asked_for(tmp_path: Path) -> None:
    _, found = examined(tmp_path, "--workers", "3", "--network", "100mbit,20ms")
    assert (found["network"], found["emulation"]) == ("100mbit,20ms", PLAN.emulation)
    assert [pair["ranks"] for pair in found["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    for pair in found["pairs"]:
        assert pair["minimum_round_trip_seconds"] == pytest.approx(0.02, abs=0.002)
        for direction in ("forth", "back"):
            assert pair[f"{direction}_bits_per_second"] == pytest.approx(100e6, rel=0.1)
    assert [host["address"] for host in found["hosts"]] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    assert found["verdict"].startswith("3 hosts, 9")


def refused(*options: str) -> str:
    return plain(refusal("doctor", *options))


def test_what_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no peer to measure" in refused("--workers", "1")
    assert "leave out --nnodes" in refused("--network", "1mbit", "--nnodes", "2", "--rendezvous", "a:1")
    assert "--rendezvous" in refused("--nnodes", "2")
    assert "such as 20mbit" in refused("--network", "fast")
    monkeypatch.setattr(
        module, "enter", lambda network, faults: EmulationPlan(emulation="paced", reason="there is no tun")
    )
    assert "1mbit cannot be emulated" in refused("--network", "1mbit")


def host(rank: int, torch: str) -> HostReport:
    return HostReport(
        rank=rank, name="lab", address=f"10.77.0.{rank + 1}", interface="eth0", gossamer="0.1.0", torch=torch,
        python="3.11.7", nccl=None, cores=8, memory_bytes=64_000_000_000, gpus=("H100",) * rank, load_average=0.1,
        clock_offset_seconds=-0.003 * rank,
    )  # fmt: skip


def shown(report: DoctorReport, color: bool = False) -> str:
    console = Console(width=120, force_terminal=color, highlight=False)
    with console.capture() as capture:
        module._show(report, console)
    return capture.get()


def plain(line: str) -> str:
    return " ".join(line.split())


def test_differing_versions_stand_out_and_problems_are_reported() -> None:
    broken = PairReport(ranks=(0, 1), problems=("rank 0 cannot reach rank 1 at 10.77.0.2 (timed out)",))
    report = DoctorReport(hosts=(host(0, "2.13.0"), host(1, "2.12.0")), pairs=(broken,), seconds=1.0)
    lines = shown(report).splitlines()
    assert plain(lines[1]) == "0-1 - - - -"
    assert plain(lines[3]) == "rank torch host interface address cores load memory gpus clock"
    assert plain(lines[5]) == "1 2.12.0 lab eth0 10.77.0.2 8 0.1 64.0 GB H100 -3.00 ms"
    assert "All run gossamer 0.1.0, python 3.11.7." in lines
    assert broken.problems[0] in lines
    assert lines[-1] == "2 hosts, no pair could be measured, pair 0-1 cannot communicate, versions of torch differ"
    assert "\x1b[1;33m2.12.0" in shown(report, color=True)


def test_missing_kernels_are_reported_once_with_the_line_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LIBRARY", Path("nowhere.so"))
    monkeypatch.setattr(library, "wanted_kernels", lambda: None)
    monkeypatch.setattr(library, "library", lambda: None)
    missing = library.missing_kernels()
    hosts = [replace(host(rank, "2.13.0"), missing_kernels=missing if rank else None) for rank in range(3)]
    told = [
        line for line in shown(DoctorReport(hosts=tuple(hosts), pairs=(), seconds=1.0)).splitlines() if "built" in line
    ]
    assert told == [f"ranks 1, 2: {missing}"]
    assert "pip install" in told[0]


def test_equal_versions_take_no_columns() -> None:
    fine = PairReport(ranks=(0, 1), minimum_round_trip_seconds=0.02, median_round_trip_seconds=0.021,
                forth_bits_per_second=94e6, back_bits_per_second=93e6)  # fmt: skip
    report = DoctorReport(hosts=(host(0, "2.13.0"), host(1, "2.13.0")), pairs=(fine,), seconds=1.0, backend="gloo",
                    join_seconds=0.25)  # fmt: skip
    text = shown(report)
    assert plain(text.splitlines()[1]) == "0-1 20 ms 21 ms 94 Mbit/s 93 Mbit/s"
    assert text.count("2.13.0") == 1
    assert "All run gossamer 0.1.0, torch 2.13.0, python 3.11.7." in text
    assert "A process group of all workers (gloo) was created in 250 ms." in text
