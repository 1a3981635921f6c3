"""A launcher's own coordinator, as it sees and is asked by others, and what it says of one that cannot be joined."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gossamer.environment.run_settings import tls_contexts
from gossamer.errors import ConnectError
from gossamer.launch.local_coordinator import LocalCoordinator, check_joinable
from gossamer.launch.worker_range import WorkerRange
from gossamer.transports.elastic.agent import MembershipAgent
from gossamer.transports.elastic.remote_control import ask_status, resize
from gossamer.transports.rpc.sockets import Tls

TOKEN, OTHER = bytes(range(32)), bytes(32)
LOOPBACK = "127.0.0.1"


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[LocalCoordinator]:
    made = LocalCoordinator(
        WorkerRange(least=1, most=4, initial=2), (LOOPBACK, 0), TOKEN, tmp_path, note=lambda text: None
    )
    yield made
    made.close()


def check_names_the_cause_within_two_seconds(address: tuple[str, int], cause: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConnectError, match=cause):
        check_joinable(address, TOKEN)
    assert time.monotonic() < began + 2.5  # of a busy machine


def test_a_run_with_the_same_token_can_be_joined(coordinator: LocalCoordinator) -> None:
    check_joinable(coordinator.address, TOKEN)
    assert ask_status(coordinator.address, TOKEN) == "0 of 2 workers are here"


def test_a_run_with_another_token_cannot(coordinator: LocalCoordinator) -> None:
    began = time.monotonic()
    with pytest.raises(ConnectError, match="knows nothing of this token"):
        check_joinable(coordinator.address, OTHER)
    assert time.monotonic() < began + 2.5


def test_where_nothing_listens_nobody_waits() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    check_names_the_cause_within_two_seconds((LOOPBACK, port), "Nothing listens")


def test_whatever_else_listens_is_no_coordinator() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        check_names_the_cause_within_two_seconds(listener.getsockname()[:2], "is no coordinator")


def test_a_name_that_means_nothing_is_said_to_be_wrong() -> None:
    check_names_the_cause_within_two_seconds(("no-such-host.invalid", 1), "the address is wrong")


def test_two_coordinators_at_one_port_are_refused_with_another(coordinator: LocalCoordinator, tmp_path: Path) -> None:
    port = coordinator.address[1]
    (tmp_path / "second").mkdir()
    with pytest.raises(ConnectError, match=f"--listen {LOOPBACK}:{port + 1}"):
        LocalCoordinator(
            WorkerRange(least=1, most=4, initial=2), coordinator.address, TOKEN, tmp_path / "second", note=print
        )
    with pytest.raises(ConnectError, match="Name an address of this machine"):
        LocalCoordinator(
            WorkerRange(least=1, most=4, initial=2), ("192.0.2.1", 0), TOKEN, tmp_path / "second", note=print
        )


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not installed")
    folder = tmp_path / "tls"
    folder.mkdir()
    making = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([*making.split(), *files], check=True, capture_output=True)
    shutil.copy(folder / "cert.pem", folder / "ca.pem")
    return Tls(*tls_contexts(str(folder)))


def test_an_encrypted_run_is_joined_encrypted(tmp_path: Path, tls: Tls) -> None:
    range_ = WorkerRange(least=1, most=4, initial=2)
    coordinator = LocalCoordinator(range_, (LOOPBACK, 0), TOKEN, tmp_path, lambda text: None, tls)
    try:
        check_joinable(coordinator.address, TOKEN, tls)
        with pytest.raises(ConnectError, match="--tls"):
            check_joinable(coordinator.address, TOKEN)
    finally:
        coordinator.close()


def check_each_request_is_heard_once(asked: Callable[[], int | None], address: tuple[str, int]) -> None:
    assert asked() is None
    for most in (4, 3, 3):
        resize(address, TOKEN, most)
        assert asked() == most, "also where nothing changes: some may be missing"
        assert asked() is None


def test_each_request_for_another_number_is_heard_once(coordinator: LocalCoordinator) -> None:
    check_each_request_is_heard_once(coordinator.asked, coordinator.address)


def test_the_check_of_requests_notices_who_only_sees_changes(coordinator: LocalCoordinator) -> None:
    known = [4]

    def changed() -> int | None:
        before, known[0] = known[0], coordinator._server.most
        return None if before == known[0] else known[0]

    with pytest.raises(AssertionError):
        check_each_request_is_heard_once(changed, coordinator.address)


def test_the_first_view_does_not_wait_for_who_was_lost_on_the_way(coordinator: LocalCoordinator) -> None:
    agent = MembershipAgent(coordinator.address, TOKEN)
    agent.here((LOOPBACK, 1))
    assert not coordinator.members
    coordinator.expect(1)
    assert agent.first_view(30.0).world == 1
    agent.close()


def test_members_are_those_of_the_view_that_are_not_lost(coordinator: LocalCoordinator) -> None:
    agents = [MembershipAgent(coordinator.address, TOKEN, number=number) for number in (11, 12)]
    for agent in agents:
        agent.here((LOOPBACK, 1))
    assert agents[0].first_view(30.0).world == 2
    assert set(coordinator.members) == {11, 12}
    coordinator.gone(12)
    assert set(coordinator.members) == {11}
    for agent in agents:
        agent.close()
