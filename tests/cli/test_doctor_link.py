"""`gossamer doctor LINK`: how a run and its workers are reached, and the advice where they are not."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.command_line import output_of, refusal

from gossamer.cli.doctor_link import LinkReport, advice, is_translated
from gossamer.cli.main import gossamer
from gossamer.comm.elastic.agent import MembershipAgent
from gossamer.comm.elastic.coordinator_server import CoordinatorServer
from gossamer.comm.elastic.invited import AddressCheck, MemberCheck
from gossamer.comm.elastic.remote_control import invite
from gossamer.comm.membership.invitations import JoinLink, Welcome
from gossamer.comm.membership.next_view import CoordinatorOptions

TOKEN, LOOPBACK = bytes(range(32)), "127.0.0.1"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@contextmanager
def run_with(*members: tuple[str, int], relays: bool = False) -> Iterator[CoordinatorServer]:
    """A coordinator whose first view has workers at these addresses."""
    server = CoordinatorServer(
        CoordinatorOptions(least=1, most=4, initial=max(1, len(members)), relays=relays),
        token=TOKEN,
        address=LOOPBACK,
        journal=None,
        note=lambda text: None,
        welcome=Welcome(token=bytes(40), addresses=()),
    )
    agents = [MembershipAgent(server.address, TOKEN, place=place) for place in range(len(members))]
    try:
        for agent, address in zip(agents, members, strict=True):
            agent.here(address)
        for agent in agents:
            agent.first_view(60.0)
        yield server
    finally:
        for each in (*agents, server):
            each.close()


def examined(link: JoinLink) -> tuple[int, str]:
    Path("link").touch(0o600)
    Path("link").write_text(link.link())
    code, printed = output_of(gossamer, "doctor", "@link", "--json", "report.json")
    assert link.link() not in printed + Path("report.json").read_text()
    return code, " ".join(printed.split())


def closed_port() -> tuple[str, int]:
    with socket.create_server((LOOPBACK, 0)) as listener:
        return LOOPBACK, listener.getsockname()[1]


def test_a_run_with_reachable_workers_can_be_joined() -> None:
    with socket.create_server((LOOPBACK, 0)) as worker:
        with run_with(worker.getsockname()[:2]) as server:
            code, printed = examined(invite(server.address, TOKEN, lifetime_seconds=None, uses=1))
        assert code == 0
        assert f"0 at {LOOPBACK}:{worker.getsockname()[1]}" in printed
        assert "The worker can be reached from this machine" in printed
        assert "router" not in printed
    report = json.loads(Path("report.json").read_text())
    assert report["healthy"]
    assert [each["problem"] for each in report["workers"]] == [""]


def test_a_worker_that_cannot_be_reached_is_named_with_a_remedy() -> None:
    with socket.create_server((LOOPBACK, 0)) as worker, run_with(worker.getsockname()[:2], closed_port()) as server:
        code, printed = examined(invite(server.address, TOKEN, lifetime_seconds=None, uses=None))
    assert code == 1
    assert "not at all: Connection refused" in printed
    assert "1 of 2 workers cannot be reached" in printed
    assert "--relay" in printed
    assert "--interface NAME" in printed


def test_a_worker_that_cannot_be_reached_is_reached_by_a_relay() -> None:
    with run_with(closed_port(), relays=True) as server:
        code, printed = examined(invite(server.address, TOKEN, lifetime_seconds=None, uses=None))
    assert code == 0
    assert "by the relay (Connection refused)" in printed
    assert "1 of 1 workers are reached by the relay" in printed


def test_an_examination_does_not_use_up_the_link() -> None:
    with run_with() as server:
        link = invite(server.address, TOKEN, lifetime_seconds=None, uses=1)
        for _ in range(2):
            code, printed = examined(link)
            assert (code, "has no workers yet" in printed) == (0, True)


def test_a_run_that_cannot_be_reached_is_reported_with_a_remedy() -> None:
    code, printed = examined(JoinLink(number=1, run="00" * 8, secret=bytes(32), addresses=(closed_port(),)))
    assert code == 1
    assert "Connection refused" in printed
    assert "--public-address HOST:PORT" in printed


def test_a_link_that_is_not_valid_is_reported_with_the_reason() -> None:
    with run_with() as server:
        link = invite(server.address, TOKEN, lifetime_seconds=1e-6, uses=None)
        code, printed = examined(link)
    assert code == 1
    assert "expired" in printed
    assert "gossamer invite RUN" in printed


def test_an_encrypted_run_asks_for_certificates() -> None:
    link = JoinLink(number=1, run="00" * 8, secret=bytes(32), addresses=((LOOPBACK, 9),), encrypted=True)
    Path("link").touch(0o600)
    Path("link").write_text(link.link())
    assert "--tls FOLDER" in refusal("doctor", "@link")


@pytest.mark.parametrize(
    ("own", "seen", "translated"),
    [
        ("192.168.1.5", "203.0.113.7", True),
        ("192.168.1.5", "192.168.1.5", False),
        ("192.168.1.5", "::ffff:192.168.1.5", False),
        ("fe80::1%eth0", "fe80::1", False),
        ("", "203.0.113.7", False),
        ("10.0.0.1", "", False),
    ],
)
def test_a_router_in_between_is_detected_by_the_two_addresses(own: str, seen: str, translated: bool) -> None:
    assert is_translated(own, seen) is translated


def test_a_router_in_between_is_reported_even_if_all_workers_are_reached() -> None:
    office = ("203.0.113.1", 2)
    report = LinkReport("00", (entrance(5000),), (MemberCheck(addresses=(office,), reached=office, seconds=0.04),))
    assert report.healthy
    first, second = advice(report)
    assert "The worker can be reached" in first
    assert "192.168.1.5:4000 appears as 203.0.113.7:5000" in second


def entrance(seen_port: int, relays: bool = False) -> AddressCheck:
    own, seen = ("192.168.1.5", 4000), ("203.0.113.7", seen_port)
    return AddressCheck(address=("203.0.113.1", 1), seconds=0.04, own=own, seen_as=seen, relays=relays)


@pytest.mark.parametrize(
    ("own_port", "port", "relays", "way"),
    [
        (4000, 4000, False, "hole punching"),
        (4000, 4000, True, "hole punching"),
        (5000, 4000, True, "relay"),
        (4000, 5000, True, "relay"),
        (4000, 5000, False, ""),
    ],
)
def test_a_worker_behind_a_router_is_reached_if_both_routers_give_one_address_to_a_port(
    own_port: int, port: int, relays: bool, way: str
) -> None:
    addresses = (("192.168.1.5", 4000), ("203.0.113.8", port))
    member = MemberCheck(addresses=addresses, problem="no answer")
    report = LinkReport("00", (entrance(own_port, relays),), (member,))
    assert way in report.way_to(member)
    assert report.healthy is bool(report.way_to(member))
    assert way in next(advice(report))


def test_a_worker_that_is_reached_at_the_address_of_its_router_is_reached_directly() -> None:
    addresses = (("192.168.1.5", 4000), ("203.0.113.8", 4000))
    member = MemberCheck(addresses=addresses, reached=addresses[1], seconds=0.04)
    assert LinkReport("00", (entrance(5000),), (member,)).way_to(member) == "directly, at 203.0.113.8:4000"


def test_the_fastest_of_several_addresses_is_the_entrance() -> None:
    checks = [AddressCheck(address=("a", 1), seconds=0.2), AddressCheck(address=("b", 1), seconds=0.1)]
    assert LinkReport("00", (*checks, AddressCheck(address=("c", 1), problem="x")), ()).entrance == checks[1]
