"""Mesh connections: how ranks are connected, or are not, and what then answers them."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.mesh_group import both

from gossamer.base.kernels.library import are_built
from gossamer.comm.environment.run_token import run_token
from gossamer.comm.handshake import HEADER_BYTES, NONCE_BYTES, PROOF_BYTES, Dialer
from gossamer.comm.mesh import connect as connecting
from gossamer.comm.mesh import transport
from gossamer.comm.mesh.collective_selector import check_requested
from gossamer.comm.mesh.connect import connect
from gossamer.comm.mesh.greeter import CLAIMS, PURPOSE, meeting_key
from gossamer.comm.mesh.transport import MeshTransport, mesh_transport
from gossamer.comm.simulated import SimulatedGroup
from gossamer.errors import ConnectError, MismatchError

pytestmark = pytest.mark.skipif(not are_built(), reason="the compiled loops are not there")


def test_strangers_are_hung_up_on():
    engines = SimulatedGroup(2, patience_seconds=20.0).transports

    def meddled(rank, text):
        """Before rank 0 hears of anybody, somebody else calls it, who knows no secret."""
        heard = engines[rank].all_gather_text(text)
        if rank == 1 and heard[0]:
            host, port, *_ = heard[0].split()
            with socket.create_connection((host, int(port)), 5) as stranger:
                stranger.sendall(b"x" * 40)
        return heard

    with ThreadPoolExecutor(2) as pool:
        tickets = [
            pool.submit(connect, rank, 2, "127.0.0.1", lambda text, rank=rank: meddled(rank, text)) for rank in (0, 1)
        ]
        ends = [ticket.result(20) for ticket in tickets]
    for end in ends:
        for each in end:
            if each is not None:
                each.close()


TOKEN = bytes(range(32))


def called_as_rank_1(host, port, key):
    """What rank 0 answers to a call by whoever holds this key."""
    with socket.create_connection((host, port), 5) as stranger:
        dialer = Dialer(PURPOSE, key, CLAIMS.pack(0, 1, 0))
        dialer.receive(stranger.recv(HEADER_BYTES + NONCE_BYTES, socket.MSG_WAITALL))
        stranger.sendall(dialer.output())
        return stranger.recv(HEADER_BYTES + PROOF_BYTES, socket.MSG_WAITALL)


def strangers_answers(token):
    """Whoever has read what the ranks tell each other calls rank 0 as rank 1 would, with this token."""
    tickets = []

    def meddled(engine, text):
        heard = engine.all_gather_text(text)
        if heard[0]:
            told = [each.split() for each in heard]
            key = meeting_key(token, b"".join(bytes.fromhex(secret) for _, _, secret, _ in told))
            if engine.rank == 1:
                tickets.append(pool.submit(called_as_rank_1, told[0][0], int(told[0][1]), key))
        elif engine.rank == 1 and len(tickets) == 1:  # before it greets rank 0 itself
            tickets[0].exception(10)
        return heard

    with ThreadPoolExecutor(1) as pool:
        ends = both(lambda engine: connect(engine.rank, 2, "127.0.0.1", lambda text: meddled(engine, text), TOKEN))
        return tickets[0].result(10), ends


def test_a_peer_that_knows_the_secrets_and_no_token_is_hung_up_on():
    answer, ends = strangers_answers(b"")
    assert answer == b""
    ends[0][1].setblocking(True)
    ends[1][0].sendall(b"rank 1")
    assert ends[0][1].recv(6) == b"rank 1"
    ends[0][1].close()
    ends[1][0].close()


def test_a_peer_that_holds_the_token_is_no_stranger():
    """The twin of the test above: it takes rank 1's place, which then is not connected."""
    answer, _ = strangers_answers(TOKEN)
    assert len(answer) == HEADER_BYTES + PROOF_BYTES


def test_ranks_that_hold_different_tokens_are_told_at_once():
    for tokens in ((TOKEN, b""), (b"", TOKEN), (TOKEN, TOKEN[::-1])):
        found = both(
            lambda engine, tokens=tokens: connect(
                engine.rank, 2, "127.0.0.1", engine.all_gather_text, tokens[engine.rank]
            )
        )
        for rank, each in enumerate(found):
            assert isinstance(each, MismatchError)
            assert f"rank {rank} has a different token than rank {1 - rank}" in str(each)


def test_the_runs_token_is_what_is_proven(monkeypatch, tmp_path):
    (tmp_path / "token").write_bytes(TOKEN)
    monkeypatch.setenv("GOSSAMER_TOKEN_FILE", str(tmp_path / "token"))
    given = []

    def noted(*arguments):
        given.append(arguments[-1])
        raise ConnectError("enough is known")

    monkeypatch.setattr(transport, "connect", noted)
    both(lambda engine: mesh_transport(engine, "127.0.0.1", "ring"))
    assert given == [run_token()] * 2


def test_ranks_that_ask_for_different_collectives_are_reported():
    found = both(lambda engine: mesh_transport(engine, "127.0.0.1", ("ring", "tree")[engine.rank]))
    assert all(isinstance(each, MismatchError) and "ring, tree" in str(each) for each in found)


def test_the_engine_serves_all_where_one_asks_for_it():
    found = both(lambda engine: mesh_transport(engine, "127.0.0.1", ("engine", "auto")[engine.rank]))
    assert not any(isinstance(each, MeshTransport | Exception) for each in found)


def test_an_address_where_one_cannot_listen_is_told_to_all():
    found = both(
        lambda engine: connect(engine.rank, 2, ("127.0.0.1", "192.0.2.1")[engine.rank], engine.all_gather_text)
    )
    assert all(isinstance(each, ConnectError) and "rank 1 at 192.0.2.1" in str(each) for each in found)


def test_nobody_waits_for_a_rank_that_could_not_call():
    def elsewhere(engine, text):
        """As a rank on another machine hears of loopback: nobody listens there."""
        heard = engine.all_gather_text(text)
        return [" ".join(["127.0.0.1 1", *text.split()[2:]]) for text in heard] if engine.rank and heard[0] else heard

    began = time.monotonic()
    found = both(lambda engine: connect(engine.rank, 2, "127.0.0.1", lambda text: elsewhere(engine, text)))
    assert all(isinstance(each, ConnectError) and "rank 1" in str(each) for each in found)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("wish", ["hierarchical(", "hierarchical(4", "hierarchical(0)", "hierarchical(²)", "ring(4)"])
def test_an_invalid_collective_is_refused(wish):
    check_requested("hierarchical(4)")
    with pytest.raises(ValueError, match="unknown collective"):
        check_requested(wish)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_workers_meet_at_addresses_of_ipv6_too():
    found = both(lambda engine: connect(engine.rank, 2, "::1", engine.all_gather_text))
    assert [end[1 - rank].family for rank, end in enumerate(found)] == [socket.AF_INET6] * 2
    for rank, end in enumerate(found):
        end[1 - rank].close()


def test_a_rank_that_is_slow_costs_the_others_nothing_of_their_time(monkeypatch):
    """Two minutes pass while all hear of each other; and one connection is tried for seconds."""
    mine, tried = threading.local(), []
    dial = socket.create_connection

    def gather(engine, text):
        mine.now = getattr(mine, "now", 0.0) + 120.0
        return engine.all_gather_text(text)

    def noted(place, seconds):
        tried.append(seconds)
        return dial(place, seconds)

    monkeypatch.setattr(connecting.time, "monotonic", lambda: getattr(mine, "now", 0.0))
    monkeypatch.setattr(connecting.socket, "create_connection", noted)
    found = both(lambda engine: connect(engine.rank, 2, "127.0.0.1", lambda text: gather(engine, text)))
    for rank, end in enumerate(found):
        end[1 - rank].close()
    assert tried == [connecting.DIAL_SECONDS]
