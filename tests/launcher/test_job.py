from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gossamer.launcher.job import Job, interfaces, loopback


def job(**changes: Any) -> Job:
    return Job(**{"script": Path("train.py"), "logs": Path("logs")} | changes)


def test_one_machine_talks_over_loopback() -> None:
    added = job().environment(Path("/run"), {})
    assert added["GLOO_SOCKET_IFNAME"] == loopback()
    assert loopback() in interfaces()
    assert added["GOSSAMER_RUN_DIRECTORY"] == "/run"
    assert "GOSSAMER_RECIPE" not in added


def test_what_the_user_has_set_stays() -> None:
    given = {"GLOO_SOCKET_IFNAME": "eth7", "OMP_NUM_THREADS": "5"}
    assert not set(given) & set(job().environment(Path("/run"), given))


def test_an_interface_that_was_asked_for_beats_the_environment() -> None:
    added = job(interface="eth0").environment(Path("/run"), {"GLOO_SOCKET_IFNAME": "eth7"})
    assert added["GLOO_SOCKET_IFNAME"] == added["NCCL_SOCKET_IFNAME"] == "eth0"


def test_several_machines_choose_their_interface_themselves() -> None:
    added = job(nodes=2, rendezvous="10.0.0.1:29500").environment(Path("/run"), {})
    assert "GLOO_SOCKET_IFNAME" not in added


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert job(workers=3).environment(Path("/run"), {})["OMP_NUM_THREADS"] == "2"
    assert job(workers=9).environment(Path("/run"), {})["OMP_NUM_THREADS"] == "1"


def test_ranks_of_the_second_machine() -> None:
    assert list(job(workers=2, nodes=2, node_rank=1, rendezvous="a:1").local_ranks) == [2, 3]


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"nodes": 2}, {"node_rank": 1}])
def test_jobs_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"workers|machines|node_rank"):
        job(**wrong)
