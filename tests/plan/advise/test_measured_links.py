"""Networks from a doctor's report."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from gossamer.comm.network import read_network
from gossamer.comm.network.parse import NetworkError
from gossamer.plan.advise.measured_links import contradictions, read_links
from gossamer.plan.doctor import HostReport, PairReport


def _host(rank: int, cores: int = 8) -> dict[str, object]:
    return asdict(
        HostReport(
            rank=rank,
            name=f"h{rank}",
            address="10.0.0.1",
            interface="eth0",
            gossamer="0.1.0",
            torch="2.13",
            python="3.11",
            nccl=None,
            cores=cores,
            memory_bytes=2**34,
            gpus=(),
            load_average=0.1,
        )
    )


def _pair(a: int, b: int, rate: float | None = 1e8, seconds: float | None = 0.02) -> dict[str, object]:
    return asdict(
        PairReport(
            ranks=(a, b),
            minimum_round_trip_seconds=seconds,
            median_round_trip_seconds=seconds,
            forth_bits_per_second=rate,
            back_bits_per_second=rate,
        )
    )


def _written(folder: Path, hosts: list[object], pairs: list[object]) -> Path:
    file = folder / "links.json"
    file.write_text(json.dumps({"verdict": "4 hosts", "hosts": hosts, "pairs": pairs, "seconds": 5.0}))
    return file


def _three(folder: Path) -> Path:
    return _written(folder, [_host(0), _host(1), _host(2, cores=2)], [_pair(0, 1), _pair(0, 2, 1e7), _pair(1, 2, 1e7)])


def test_lines_are_as_fast_as_their_best_pair(tmp_path: Path) -> None:
    network, _ = read_links(_three(tmp_path), 3)
    assert [host.up_bits_per_second for host in network.hosts] == [1e8, 1e8, 1e7]
    assert network.path(0, 1).round_trip_seconds == pytest.approx(0.02)


def test_machines_that_are_not_alike_are_reported(tmp_path: Path) -> None:
    file = _three(tmp_path)
    assert "differ (rank 0: 8 cores; rank 1: 8 cores; rank 2: 2 cores)" in read_links(file, 3)[1][0]
    assert read_links(file, 2)[1] == ()


def test_a_network_that_contradicts_what_was_measured(tmp_path: Path) -> None:
    found, _ = read_links(_three(tmp_path), 3)
    assert contradictions(read_network("100mbit,20ms", 2), found) == ()
    said = contradictions(read_network("100mbit,80ms", 3), found)
    assert "host 2 has a measured rate of 10 Mbit/s, and 100 Mbit/s in 100mbit,80ms" in said[0]
    assert "20 ms as measured, and 80 ms" in said[1]


@pytest.mark.parametrize(
    ("hosts", "pairs", "said"),
    [
        ([_host(0)], [], "has 1 ranks, and 2 workers"),
        ([_host(0), _host(1)], [], "not measured at all"),
        ([_host(0), _host(1)], [_pair(0, 1, None)], "no measurement between ranks 0 and 1"),
        ([_host(0), {"rank": 1}], [], "cannot be read as a doctor's report"),
        (["no host"], [], "cannot be read as a doctor's report"),
        ([_host(0), _host(1)], [{"ranks": [0]}], "cannot be read as a doctor's report"),
        (
            [_host(0), _host(1)],
            [_pair(0, 1) | {"forth_bits_per_second": "fast"}],
            "cannot be read as a doctor's report",
        ),
        ([_host(0), _host(1)], [_pair(0, 1, float("inf"))], "cannot be read as a doctor's report"),
        ([_host(0), _host(1)], [_pair(0, 1, 10**400)], "cannot be read as a doctor's report"),
        ([_host(0), _host(1)], [_pair(-5, 1)], "cannot be read as a doctor's report"),
        ([_host(0), _host(1)], [_pair(0, 1) | {"ranks": [0, 1, 2]}], "cannot be read as a doctor's report"),
        ([_host(0), _host(1)], [_pair(0, 1) | {"ranks": ["a", "b"]}], "cannot be read as a doctor's report"),
    ],
)
def test_what_was_not_measured_is_refused(tmp_path: Path, hosts: list[object], pairs: list[object], said: str) -> None:
    with pytest.raises(NetworkError, match=said):
        read_links(_written(tmp_path, hosts, pairs), 2)


def test_an_invalid_report_is_refused(tmp_path: Path) -> None:
    (tmp_path / "links.json").write_text("[1, 2]")
    with pytest.raises(NetworkError, match="gossamer doctor --nnodes"):
        read_links(tmp_path / "links.json", 2)
