"""Machines meet in one store: ranks follow from their numbers of workers, and machine 0 waits for all ends."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.processes import free_port

from gossamer.errors import ConnectError
from gossamer.launcher.job import Job
from gossamer.launcher.rendezvous import MachineRendezvous


def job(tmp_path: Path, port: int, node_rank: int, workers: int, nodes: int = 2) -> Job:
    place = f"127.0.0.1:{port}" if nodes > 1 else None
    return Job(
        script=Path("train.py"), workers=workers, nodes=nodes, node_rank=node_rank, rendezvous=place, logs=tmp_path
    )


@pytest.fixture
def both(tmp_path: Path) -> tuple[MachineRendezvous, MachineRendezvous]:
    """Two that have met; machine 0 has one worker and machine 1 has three."""
    port = free_port()
    first = MachineRendezvous(job(tmp_path, port, 0, 1))
    second = MachineRendezvous(job(tmp_path, port, 1, 3))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(MachineRendezvous.meet, (first, second)))
    return first, second


def test_ranks_follow_from_the_workers_of_all_machines(both: tuple[MachineRendezvous, MachineRendezvous]) -> None:
    assert [machine.first_rank for machine in both] == [0, 1]
    assert [machine.world for machine in both] == [4, 4]
    assert both[0].run == both[1].run
    assert len(both[0].run) == 16
    assert both[0].port == both[1].port


def test_a_machine_waits_for_the_end_of_the_other(both: tuple[MachineRendezvous, MachineRendezvous]) -> None:
    ended = threading.Event()

    def first() -> bool:
        both[0].wait_for_ends()
        return ended.is_set()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first)
        ended.set()
        both[1].wait_for_ends()
        assert waiting.result(30)


def test_one_machine_meets_nobody_and_waits_for_nobody(tmp_path: Path) -> None:
    met: list[str] = []
    alone = MachineRendezvous(job(tmp_path, 0, 0, 2, nodes=1), lambda store, address: met.append(address))
    alone.meet()
    alone.wait_for_ends()
    assert (alone.first_rank, alone.world, met) == (0, 2, ["127.0.0.1"])


def test_machines_that_do_not_come_are_an_error_with_the_line_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOSSAMER_TIMEOUT", "1")
    with pytest.raises(ConnectError, match="--node-rank 0"):
        MachineRendezvous(job(tmp_path, free_port(), 0, 1)).meet()
