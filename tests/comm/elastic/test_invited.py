"""Invited machines: real connections to a coordinator with invitations, in one process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.certificates import certificates

from gossamer.base.peer_ops import WORKER, Peer, Pull, Push, Stamp
from gossamer.comm.elastic.agent import LARGEST_FRAME_BYTES, RUN
from gossamer.comm.elastic.coordinator_server import CoordinatorServer
from gossamer.comm.elastic.invited import check_addresses, redeem
from gossamer.comm.elastic.remote_control import invite, resize, revoke
from gossamer.comm.membership.invitations import GUEST, JoinLink, Welcome
from gossamer.comm.membership.messages import COORDINATOR, HERE, RESIZE, STATUS
from gossamer.comm.membership.next_view import CoordinatorOptions
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc_protocol.credentials import Credentials
from gossamer.comm.tls_contexts import tls_contexts
from gossamer.errors import ConnectError, GossamerError

TOKEN, CONTENT = bytes(range(32)), bytes(range(100))
LOOPBACK = "127.0.0.1"


def serve(**options: object) -> CoordinatorServer:
    arguments = {
        "token": TOKEN,
        "address": LOOPBACK,
        "journal": None,
        "note": lambda text: None,
        "welcome": Welcome(token=CONTENT, addresses=(), settings={"recipe": "Int8()"}),
    }
    run = CoordinatorOptions(least=1, most=4, initial=1)
    return CoordinatorServer(run, **arguments | options)  # type: ignore[arg-type]


@pytest.fixture
def server() -> Iterator[CoordinatorServer]:
    with closing(serve()) as server:
        yield server


@pytest.fixture
def invitation(server: CoordinatorServer) -> JoinLink:
    return invite(server.address, TOKEN, lifetime_seconds=None, uses=None)


def closed_port() -> tuple[str, int]:
    with socket.create_server((LOOPBACK, 0)) as listener:
        return LOOPBACK, listener.getsockname()[1]


def test_a_link_is_exchanged_for_the_token_of_the_run(server: CoordinatorServer, invitation: JoinLink) -> None:
    assert invitation.addresses == (server.address,)
    address, found = redeem(invitation)
    assert (address, found.token, found.settings) == (server.address, CONTENT, {"recipe": "Int8()"})


def test_addresses_without_an_answer_do_not_prevent_joining(server: CoordinatorServer, invitation: JoinLink) -> None:
    with closing(serve(token=bytes(32))) as other, socket.create_server((LOOPBACK, 0)) as silent:
        wrong = (closed_port(), ("no-such-host.invalid", 1), other.address, silent.getsockname()[:2])
        address, found = redeem(replace(invitation, addresses=(*wrong, server.address)))
    assert (address, found.token) == (server.address, CONTENT)


def test_an_unreachable_run_is_reported_in_one_line_with_each_address(invitation: JoinLink) -> None:
    addresses = (closed_port(), closed_port())
    with pytest.raises(ConnectError, match="--public-address") as caught:
        redeem(replace(invitation, addresses=addresses))
    assert all(f"{LOOPBACK}:{port}" in str(caught.value) for _, port in addresses)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("token", [TOKEN, bytes(32)], ids=["the same token", "another token"])
def test_a_link_of_another_run_at_this_address_is_refused(invitation: JoinLink, token: bytes) -> None:
    with closing(serve(token=token)) as other:  # also if the command was started again with its token file
        invite(other.address, token, lifetime_seconds=None, uses=None)
        with pytest.raises(ConnectError, match=rf"run {invitation.run[:8]}, which is over.*gossamer invite"):
            redeem(replace(invitation, addresses=(other.address,)))


def test_a_used_link_and_a_revoked_one_are_refused_with_the_reason(server: CoordinatorServer) -> None:
    once = invite(server.address, TOKEN, lifetime_seconds=None, uses=1)
    redeem(once)
    with pytest.raises(ConnectError, match="used 1 of 1 times"):
        redeem(once)
    revoke(server.address, TOKEN, once.number)
    with pytest.raises(ConnectError, match="revoked"):
        redeem(once)


def test_a_wrong_secret_does_not_open_the_run(invitation: JoinLink) -> None:
    with pytest.raises(ConnectError, match="another run"):
        redeem(replace(invitation, secret=bytes(32)))


def asked_as(peer: Peer, token: bytes, server: CoordinatorServer, op: Push | Pull) -> object:
    credentials = Credentials(me=peer, token=token, run=RUN, largest_frame_bytes=LARGEST_FRAME_BYTES)
    with TcpEndpoint(credentials) as endpoint:
        endpoint.meet({COORDINATOR: server.address})
        return endpoint.answer(op)


@pytest.mark.parametrize("key", [HERE, RESIZE])
def test_a_guest_cannot_act_as_a_worker_or_resize_the_run(
    server: CoordinatorServer, invitation: JoinLink, key: str
) -> None:
    push = Push(to=COORDINATOR, key=key, stamp=Stamp(0, 2), within_seconds=20.0)
    answer = asked_as(Peer(GUEST, invitation.number << 32), invitation.secret, server, push)
    assert "a guest cannot" in str(answer)
    assert (server.most, server.resizes) == (4, 0)
    with pytest.raises(GossamerError, match="token"):
        asked_as(Peer(WORKER, 1), invitation.secret, server, push)


def test_a_holder_of_the_token_without_an_invitation_is_no_guest(server: CoordinatorServer) -> None:
    pull = Pull(of=COORDINATOR, key=f"{STATUS}/0", within_seconds=20.0)
    with pytest.raises(GossamerError, match="token"):
        asked_as(Peer(GUEST, 99 << 32), TOKEN, server, pull)
    assert "connected" in str(asked_as(Peer("control", 1), TOKEN, server, pull))


def test_a_run_without_invitations_has_no_guests_and_makes_none() -> None:
    with closing(serve(welcome=None)) as server:
        with pytest.raises(GossamerError):
            invite(server.address, TOKEN, lifetime_seconds=None, uses=None)
        with pytest.raises(ConnectError, match="another run"):
            redeem(JoinLink(number=1, run="00" * 8, secret=bytes(32), addresses=(server.address,)))
        assert resize(server.address, TOKEN, 3).startswith("at most 3")


def test_a_link_of_an_encrypted_run_requires_tls(tmp_path: Path) -> None:
    tls = tls_contexts(str(certificates(tmp_path / "tls")))
    with closing(serve(tls=tls, welcome=Welcome(token=CONTENT, addresses=(), encrypted=True))) as server:
        made = invite(server.address, TOKEN, lifetime_seconds=None, uses=None, tls=tls)
        with pytest.raises(ConnectError, match="--tls FOLDER"):
            redeem(made)
        assert redeem(made, tls)[1].token == CONTENT


def test_public_addresses_come_first_and_replace_loopback() -> None:
    public = (("office.example.org", 443), ("203.0.113.7", 29700))
    with closing(serve(welcome=Welcome(token=CONTENT, addresses=public))) as server:
        assert invite(server.address, TOKEN, lifetime_seconds=None, uses=None).addresses == public


def test_all_addresses_of_a_link_are_checked(server: CoordinatorServer, invitation: JoinLink) -> None:
    found = {
        each.address: each for each in check_addresses(replace(invitation, addresses=(closed_port(), server.address)))
    }
    assert found[server.address].status == "0 of 1 workers are connected"
    assert not found[server.address].problem
    assert [each.problem for each in found.values() if each.address != server.address] == ["Connection refused"]
