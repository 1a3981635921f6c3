from __future__ import annotations

import json
from pathlib import Path

from gossamer.plan.doctor import DoctorReport, HostReport, PairReport, read_report, write_report

HOST = HostReport(
    rank=0, name="here", address="10.0.0.1", interface=None, gossamer="0.1.0", torch="2.13.0", python="3.11.7",
    nccl="2.27.5", cores=2, memory_bytes=8_000_000_000, gpus=("one", "two"), load_average=0.5,
)  # fmt: skip


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    pairs = (PairReport(ranks=(0, 1), minimum_round_trip_seconds=0.02), PairReport(ranks=(0, 2), problems=("no way",)))
    report = DoctorReport(hosts=(HOST,), pairs=pairs, seconds=1.5, backend="gloo", join_seconds=0.1)
    write_report(tmp_path / "report.json", report)
    assert read_report(tmp_path / "report.json") == report
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert json.loads((tmp_path / "report.json").read_text())["hosts"][0]["memory_bytes"] == 8_000_000_000
