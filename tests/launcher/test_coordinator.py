"""A launcher's own coordinator, as it sees and is asked by others, and what it says of one that cannot be joined."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from gossamer.comm.elastic.agent import MembershipAgent
from gossamer.comm.elastic.coordinator_server import CoordinatorServer
from gossamer.comm.elastic.remote_control import ask_status, resize
from gossamer.comm.environment.run_token import make_token_file
from gossamer.comm.membership.journal import ViewLog
from gossamer.comm.membership.next_view import CoordinatorOptions
from gossamer.comm.tls_contexts import Tls, tls_contexts
from gossamer.errors import ConnectError, PeerLost
from gossamer.launcher import coordinator as coordinator_module
from gossamer.launcher.coordinator import LocalCoordinator, joinable_run
from gossamer.launcher.elastic_run import coordinate_run, journal_path
from gossamer.launcher.job import Elasticity, Job, WorkerRange

TOKEN, OTHER = bytes(range(32)), bytes(32)
LOOPBACK = "127.0.0.1"


def coordinator_at(
    journal: Path, listen: tuple[str, int] = (LOOPBACK, 0), initial: int = 2, tls: Tls | None = None
) -> LocalCoordinator:
    options = CoordinatorOptions(least=1, most=4, initial=initial)
    serve = partial(CoordinatorServer, options, token=TOKEN, note=lambda text: None, tls=tls)
    return LocalCoordinator(serve, listen, journal)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[LocalCoordinator]:
    made = coordinator_at(tmp_path / "journal")
    yield made
    made.close()


def check_names_the_cause_within_two_seconds(address: tuple[str, int], cause: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConnectError, match=cause):
        joinable_run(address, TOKEN)
    assert time.monotonic() < began + 2.5  # of a busy machine


def test_a_run_with_the_same_token_can_be_joined(coordinator: LocalCoordinator) -> None:
    joinable_run(coordinator.address, TOKEN)
    assert ask_status(coordinator.address, TOKEN) == "0 of 2 workers are connected"


def test_two_runs_with_one_token_have_different_names_which_their_launchers_share(tmp_path: Path) -> None:
    runs = []
    for name in ("first", "second"):
        coordinator = coordinator_at(tmp_path / name)
        runs.append(coordinator.run)
        assert joinable_run(coordinator.address, TOKEN) == coordinator.run
        coordinator.close()
    assert runs[0] != runs[1]


def test_a_run_with_another_token_cannot(coordinator: LocalCoordinator) -> None:
    began = time.monotonic()
    with pytest.raises(ConnectError, match="not accept this token"):
        joinable_run(coordinator.address, OTHER)
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
    with pytest.raises(ConnectError, match=f"--listen {LOOPBACK}:{port + 1}"):
        coordinator_at(tmp_path / "second", coordinator.address)
    with pytest.raises(ConnectError, match="Name an address of this machine"):
        coordinator_at(tmp_path / "second", ("192.0.2.1", 0))


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
    return tls_contexts(str(folder))


def test_an_encrypted_run_is_joined_encrypted(tmp_path: Path, tls: Tls) -> None:
    coordinator = coordinator_at(tmp_path / "journal", tls=tls)
    try:
        joinable_run(coordinator.address, TOKEN, tls)
        with pytest.raises(ConnectError, match="--tls"):
            joinable_run(coordinator.address, TOKEN)
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


def test_the_check_of_requests_detects_a_mutant_that_only_sees_changes(coordinator: LocalCoordinator) -> None:
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


# -- a launcher that is killed, and started again by the same command --------------------------------------------------


class Killed:
    """A coordinator with two members, 11 and 12, whose launcher is killed."""

    def __init__(self, journal: Path, *, launched: tuple[int, ...]) -> None:
        self.journal, self.notes = journal, list[str]()
        before = self.start((LOOPBACK, 0))
        self.address = before.address
        for number in launched:
            before.launched(number)
        self.agents = [MembershipAgent(self.address, TOKEN, number=number) for number in (11, 12)]
        for agent in self.agents:
            agent.here((LOOPBACK, 1))
        assert [agent.first_view(30.0).world for agent in self.agents] == [2, 2]
        self.run = before._server._coordinator.rule.run
        before._server.close()  # and nothing else that an orderly end does

    def start(self, listen: tuple[str, int]) -> LocalCoordinator:
        return coordinator_at(self.journal, listen)

    def start_again(self) -> LocalCoordinator:
        again = self.start(self.address)
        again.settle(self.notes.append)
        return again

    def __enter__(self) -> Killed:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.close()


def identity(coordinator: LocalCoordinator) -> str:
    return coordinator._server._coordinator.rule.run


def test_promise_22_the_same_command_continues_the_run_where_a_worker_reports(tmp_path: Path) -> None:
    with Killed(tmp_path / "journal", launched=(11,)) as killed, closing(killed.start_again()) as again:
        assert again.resumed
        assert identity(again) == killed.run
        view = killed.agents[1].view_after(1, 30.0)
        assert [member.number for member in view.members] == [12]
        assert "(1): waiting up to 30 s" in killed.notes[0]
        assert "so it continues" in killed.notes[1]


def test_a_new_run_begins_at_once_where_all_workers_ended_with_the_launcher(tmp_path: Path) -> None:
    with Killed(tmp_path / "journal", launched=(11, 12)) as killed, closing(killed.start_again()) as again:
        assert not again.resumed
        assert identity(again) != killed.run
        assert killed.notes == []
        assert again.address == killed.address


def test_promise_22_workers_that_come_too_late_are_refused_and_the_new_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "SURVIVOR_SECONDS", 0.0)
    with Killed(tmp_path / "journal", launched=(11,)) as killed, closing(killed.start_again()) as again:
        assert "so a new run begins" in killed.notes[-1]
        with pytest.raises(PeerLost, match=f"belongs to run {killed.run:.8}"):
            killed.agents[1].view_after(1, 30.0)
        assert not again.ended
        assert not again.resumed
        fresh = MembershipAgent(again.address, TOKEN)
        fresh.here((LOOPBACK, 1))
        assert not fresh.formed
        fresh.close()


def test_a_run_that_was_over_is_not_continued(tmp_path: Path) -> None:
    with Killed(tmp_path / "journal", launched=()) as killed:
        log = ViewLog(killed.journal, lambda text: None)
        log.append({"ended": "all workers that had the parameters have left"})
        log.close()
        with closing(killed.start_again()) as again:
            assert (again.ended, again.resumed) == ("", False)
            assert identity(again) != killed.run


def test_a_run_that_was_over_before_its_first_view_is_not_continued(tmp_path: Path) -> None:
    log = ViewLog(tmp_path / "journal", lambda text: None)
    log.append({"run": "f" * 32})
    log.append({"ended": "its first launcher has ended"})
    log.close()
    made = coordinator_at(tmp_path / "journal")
    with closing(made):
        made.settle(lambda text: None)
        assert made.ended == ""
        assert identity(made) != "f" * 32


def test_promise_22_a_run_whose_journal_lost_its_end_is_not_continued(tmp_path: Path) -> None:
    """A worker of the run reports a view that the journal does not have, as where the disk was full."""
    with Killed(tmp_path / "journal", launched=(11,)) as killed:
        killed.agents[1]._scripts.learn(view=5)
        with closing(killed.start_again()) as again:
            assert (again.ended, again.resumed) == ("", False)
            assert identity(again) != killed.run
            assert "so a new run begins" in killed.notes[-1]


def test_an_orderly_end_tells_the_workers_of_other_launchers_and_leaves_no_journal(tmp_path: Path) -> None:
    made = coordinator_at(tmp_path / "journal", initial=1)
    agent = MembershipAgent(made.address, TOKEN)
    agent.here((LOOPBACK, 1))
    agent.first_view(30.0)
    worker = made._server._coordinator.rule.workers[agent.number]
    while not worker.polls:  # until it waits for news
        threading.Event().wait(0.01)
    made.close()
    with pytest.raises(PeerLost, match="its first launcher has ended"):
        agent.view_after(1, 30.0)
    agent.close()
    assert list(tmp_path.iterdir()) == []


def test_the_same_command_finds_the_journal_in_another_folder_of_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_file = tmp_path / "token"
    (tmp_path / "runs").mkdir()

    def path(
        logs: str,
        *,
        port: int = 7,
        token: bytes = TOKEN,
        file: Path | None = token_file,
        network: Path | None = None,
    ) -> Path | None:
        job = Job(script=tmp_path / "train.py", workers=2, logs=tmp_path / logs, worker_module="w", token_file=file)
        range_ = WorkerRange(least=1, most=4, initial=2)
        return journal_path(job, Elasticity(range=range_, listen=(LOOPBACK, port), network=network), token)

    assert path("runs/a") == path("runs/b")
    assert path("runs/a") != path("a")
    assert len({path("a"), path("a", port=8), path("a", token=OTHER)}) == 3
    assert path("a", port=0) is None
    assert path("a", file=None) is None
    assert path("a", network=tmp_path / "namespace") is None
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert (found := path("runs/a")) is not None
    assert found.parent == tmp_path / "runs" / "a"


@pytest.mark.parametrize(
    ("relays", "seals", "servers"),
    [(False, False, ()), (True, False, ()), (False, True, ("10.0.0.1:29701", "10.0.0.1:29702"))],
)
def test_workers_receive_the_settings_of_the_launcher_that_has_the_coordinator(
    tmp_path: Path, relays: bool, seals: bool, servers: tuple[str, ...]
) -> None:
    job = Job(script=tmp_path / "train.py", logs=tmp_path, worker_module="w")
    range_ = WorkerRange(least=1, most=4, initial=2)
    elasticity = Elasticity(range=range_, relays=relays, seals=seals, servers=servers)
    coordinator = coordinate_run(job, elasticity, make_token_file(tmp_path), tmp_path, lambda text: None)
    token = hashlib.sha256((tmp_path / "token").read_bytes()).digest()
    with closing(coordinator), closing(MembershipAgent(coordinator.address, token)) as worker:
        worker.here((LOOPBACK, 1))
        assert (worker.relay, worker.seal, worker.servers) == (relays, relays or seals, ",".join(servers))
        assert (worker.least, worker.most) == (1, 4)
        assert ask_status(coordinator.address, token) == "1 of 2 workers are connected"
