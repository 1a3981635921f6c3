"""Rendezvous endpoints of a launch: which may be listened on, who reaches them, and what is said where nobody does."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.processes import free_port

from gossamer.comm.environment import listening
from gossamer.errors import ConnectError
from gossamer.launcher import rendezvous
from gossamer.launcher.job import Job
from gossamer.launcher.rendezvous import MachineRendezvous, reach, serve_store, split_endpoint
from gossamer.launcher.served_run import PORTS, free_endpoints


def listen(endpoint: str | None, several_machines: bool = False) -> socket.socket:
    return rendezvous.listen_at(endpoint, several_machines=several_machines, interface=None)


def test_on_one_machine_only_that_machine_can_reach_the_workers_meeting() -> None:
    with listen(None) as anywhere, listen(f"127.0.0.1:{free_port()}") as named:
        assert anywhere.getsockname()[0] == named.getsockname()[0] == "127.0.0.1"


def test_loopback_is_meant_where_it_is_written_and_not_where_a_name_leads_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two machines' commands on one machine are how a trial begins; Debian lets a machine's own name mean loopback."""
    with listen(f"127.0.0.1:{free_port()}", several_machines=True) as trial:
        assert trial.getsockname()[0] == "127.0.0.1"
    monkeypatch.setattr(listening, "_addresses", lambda host: ["127.0.1.1"])
    with listen(f"my-machine:{free_port()}", several_machines=True) as named:
        assert named.getsockname()[0] != "127.0.1.1"


def test_a_port_in_use_is_named_with_the_next_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConnectError, match=f"Port {port} is in use.*--rendezvous 127.0.0.1:{port + 1}"):
            listen(f"127.0.0.1:{port}")


@pytest.mark.parametrize("endpoint", ["", "host", ":29500", "host:0", "host:²"])
def test_a_place_without_host_or_port_is_refused(endpoint: str) -> None:
    with pytest.raises(ConnectError, match="HOST:PORT"):
        split_endpoint(endpoint)


def test_an_address_of_another_machine_is_refused_on_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_dial", lambda host, port, seconds: TimeoutError("timed out"))
    with pytest.raises(ConnectError, match=r"does not lead to this machine \(timed out\).*--node-rank 0"):
        listen(f"192.0.2.1:{free_port()}", several_machines=True)


def test_a_worker_that_comes_late_finds_the_first_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        reach(f"127.0.0.1:{first.getsockname()[1]}", 5.0, print)


@pytest.mark.parametrize(
    ("problem", "cause"),
    [
        (ConnectionRefusedError("refused"), "no launcher listens there"),
        (TimeoutError("timed out"), "No answer"),
        (OSError("no route to host"), "No answer"),
        (socket.gaierror("unknown"), "write the address instead"),
    ],
)
def test_in_vain_it_reports_where_how_and_why(monkeypatch: pytest.MonkeyPatch, problem: OSError, cause: str) -> None:
    monkeypatch.setattr(rendezvous, "_dial", lambda host, port, seconds: problem)
    with pytest.raises(ConnectError, match=f"machine 0 at 127.0.0.1:9, interface .+: {problem}.*{cause}"):
        reach("127.0.0.1:9", 0.0, print)


def test_a_first_machine_that_is_not_up_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([ConnectionRefusedError(), ConnectionRefusedError(), None])
    monkeypatch.setattr(rendezvous, "_dial", lambda host, port, seconds: next(answers))
    reach("127.0.0.1:9", 5.0, print)
    assert next(answers, "all asked") == "all asked"


def test_a_first_machine_that_is_long_in_coming_is_told_of_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    moments, told = iter(range(0, 100, 3)), list[str]()
    answers = iter([ConnectionRefusedError("refused")] * 10 + [None])
    monkeypatch.setattr(rendezvous, "_dial", lambda host, port, seconds: next(answers))
    monkeypatch.setattr(rendezvous, "POLL_SECONDS", 0.0)
    reach("127.0.0.1:9", 1800.0, told.append, clock=lambda: float(next(moments)))
    waited = [int(text.split()[2]) for text in told]
    assert [seconds // 10 for seconds in waited] == [1, 2, 3, 4, 5, 6]
    assert "machine 0 to listen at 127.0.0.1:9 (refused); waiting for 30 min at most (GOSSAMER_TIMEOUT=1800)" in told[0]


def test_places_for_servers_differ_and_are_not_handed_out_to_who_dials() -> None:
    endpoints = free_endpoints("127.0.0.1", 50)
    assert len(set(endpoints)) == 50
    assert all(int(endpoint.rpartition(":")[2]) in PORTS for endpoint in endpoints)
    with pytest.raises(ConnectError, match="--interface NAME"):
        free_endpoints("192.0.2.1", 1)  # nobody's


def test_a_taken_place_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("gossamer.launcher.served_run.PORTS", range(port, port + 1))
        assert free_endpoints("127.0.0.1", 1) == ()


def check_it_listens_at_one_address_only(endpoint: str) -> None:
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.2", int(endpoint.rpartition(":")[2])))
        except OSError:
            raise AssertionError("somebody listens on every address") from None


def test_the_store_listens_where_it_was_asked_to_and_nowhere_else() -> None:
    store, endpoint = serve_store("127.0.0.1:0")
    store.set("key", "value")
    check_it_listens_at_one_address_only(endpoint)
    with pytest.raises(ConnectError, match="cannot listen at"):
        serve_store(endpoint)
    with socket.create_server(("", 0)) as anywhere, pytest.raises(AssertionError):
        check_it_listens_at_one_address_only(f"127.0.0.1:{anywhere.getsockname()[1]}")


# -- ranks follow from their numbers of workers, and machine 0 waits for all ends --------------------------------------


def job(tmp_path: Path, port: int, node_rank: int, workers: int, nodes: int = 2, seals: bool = False) -> Job:
    place = f"127.0.0.1:{port}" if nodes > 1 else None
    return Job(
        script=Path("train.py"),
        workers=workers,
        nodes=nodes,
        node_rank=node_rank,
        rendezvous=place,
        logs=tmp_path,
        seals=seals,
    )


@pytest.fixture
def both(tmp_path: Path) -> tuple[MachineRendezvous, MachineRendezvous]:
    """Two that have met; machine 0 has one worker and machine 1 has three."""
    return met(tmp_path)


def met(tmp_path: Path, *sealing: int) -> tuple[MachineRendezvous, MachineRendezvous]:
    port = free_port()
    first = MachineRendezvous(job(tmp_path, port, 0, 1, seals=0 in sealing))
    second = MachineRendezvous(job(tmp_path, port, 1, 3, seals=1 in sealing))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(MachineRendezvous.meet, (first, second)))
    return first, second


@pytest.mark.parametrize("sealing", [(), (0,), (1,), (0, 1)])
def test_all_machines_encrypt_if_one_asks_for_it(tmp_path: Path, sealing: tuple[int, ...]) -> None:
    """The name of machine 0 may be a loopback address there, so that it alone sees no need."""
    assert [machine.seals for machine in met(tmp_path, *sealing)] == [bool(sealing)] * 2


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


def test_one_machine_meets_nobody_and_waits_for_no_rank(tmp_path: Path) -> None:
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
