from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gossamer.base import system
from gossamer.base.system import LOOPBACK_INTERFACE
from gossamer.launcher.job import Job, WorkerRange, inherited, interfaces, read_worker_range


def job(**changes: Any) -> Job:
    return Job(**{"script": Path("train.py"), "logs": Path("logs")} | changes)


def test_one_machine_communicates_over_loopback() -> None:
    added = job().environment(Path("/run"), {})
    assert added["GLOO_SOCKET_IFNAME"] == LOOPBACK_INTERFACE
    assert LOOPBACK_INTERFACE in interfaces()
    assert added["GOSSAMER_RUN_DIRECTORY"] == "/run"
    assert "GOSSAMER_RECIPE" not in added


def test_what_the_user_has_set_stays() -> None:
    given = {"GLOO_SOCKET_IFNAME": "eth7", "OMP_NUM_THREADS": "5"}
    assert not set(given) & set(job().environment(Path("/run"), given))


def test_servers_that_the_user_has_named_are_inherited_and_those_of_an_enclosing_run_are_not() -> None:
    given = {"GOSSAMER_SERVERS": "10.0.0.1:7", "PATH": "/bin"}
    assert inherited(given) == given
    assert inherited({**given, "GOSSAMER_RUN_DIRECTORY": "/tmp/outer"}).keys() == {"PATH", "GOSSAMER_RUN_DIRECTORY"}


def test_an_interface_that_was_asked_for_beats_the_environment() -> None:
    added = job(interface="eth0").environment(Path("/run"), {"GLOO_SOCKET_IFNAME": "eth7"})
    assert added["GLOO_SOCKET_IFNAME"] == added["NCCL_SOCKET_IFNAME"] == "eth0"


def test_several_machines_choose_their_interface_themselves() -> None:
    added = job(nodes=2, rendezvous="10.0.0.1:29500").environment(Path("/run"), {})
    assert "GLOO_SOCKET_IFNAME" not in added


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "cores", lambda: 8)
    assert job(workers=3).environment(Path("/run"), {})["OMP_NUM_THREADS"] == "2"
    assert job(workers=9).environment(Path("/run"), {})["OMP_NUM_THREADS"] == "1"


@pytest.mark.skipif(not system.IS_LINUX, reason="only Linux reports the cores of a process")
def test_workers_share_the_cores_that_a_scheduler_has_given_to_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {8, 9, 10, 11})
    assert job(workers=2).environment(Path("/run"), {})["OMP_NUM_THREADS"] == "2"


def test_ranks_of_the_second_machine() -> None:
    assert list(job(workers=2, nodes=2, node_rank=1, rendezvous="a:1").local_ranks) == [2, 3]


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"nodes": 2}, {"node_rank": 1}])
def test_jobs_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"workers|machines|node_rank"):
        job(**wrong)


def test_a_job_that_restarts_single_workers_has_a_standby() -> None:
    job = partial(Job, script=Path("train.py"), arguments=("--lr", "1"), logs=Path("logs"), max_restarts=1)
    command = job(keeps_standby=True).standby_command
    assert command[-4:] == ("--standby", "train.py", "--lr", "1")
    assert not job().standby_command
    assert not job(keeps_standby=True, max_restarts=0).standby_command
    assert job(keeps_standby=True, hosts=(Path("/run/netns/a"),)).standby_command == command


# -- test_job_worker_range ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "numbers"), [("2:8", (2, 8, 8)), ("2:8:4", (2, 8, 4)), ("1:1", (1, 1, 1)), ("3:3:3", (3, 3, 3))]
)
def test_a_range_names_the_least_the_most_and_perhaps_the_first(text: str, numbers: tuple[int, int, int]) -> None:
    found = read_worker_range(text)
    assert (found.least, found.most, found.initial) == numbers
    assert str(found) == ":".join(text.split(":")[:2])


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("8:2", "write 2:8"),
        ("0:2", "at least 1 worker"),
        ("2:8:9", "write 2:8:8"),
        ("2:8:1", "write 2:8:2"),
        ("2:", "such as 2:8"),
        ("-1:2", "such as 2:8"),
        ("2:3:4:5", "such as 2:8"),
        ("٢:٣", "such as 2:8"),
        ("1:" + "9" * 5000, "at most 65536"),
    ],
)
def test_a_range_that_cannot_be_names_the_line_to_write(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        read_worker_range(text)


def test_a_range_is_checked_however_it_is_made() -> None:
    with pytest.raises(ValueError, match="2:4:4"):
        WorkerRange(least=2, most=4, initial=5)
