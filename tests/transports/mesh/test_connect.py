"""Mesh connections: how ranks are connected, or are not, and what then answers them."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.mesh_group import both

from gossamer.errors import ConnectError, MismatchError
from gossamer.kernels.library import library
from gossamer.transports.mesh.collective_selector import check_wish
from gossamer.transports.mesh.connect import connect
from gossamer.transports.mesh.transport import MeshTransport, mesh_transport
from gossamer.transports.simulated import SimulatedGroup

pytestmark = pytest.mark.skipif(library() is None, reason="the compiled loops are not there")


def test_strangers_are_hung_up_on():
    engines = SimulatedGroup(2, patience_seconds=20.0).transports

    def meddled(rank, text):
        """Before rank 0 hears of anybody, somebody else calls it, who knows no secret."""
        heard = engines[rank].all_gather_text(text)
        if rank == 1 and heard[0]:
            host, port, _ = heard[0].split()
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


def test_ranks_that_ask_for_different_collectives_are_told():
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
        return [f"127.0.0.1 1 {text.split()[2]}" for text in heard] if engine.rank and heard[0] else heard

    began = time.monotonic()
    found = both(lambda engine: connect(engine.rank, 2, "127.0.0.1", lambda text: elsewhere(engine, text)))
    assert all(isinstance(each, ConnectError) and "rank 1" in str(each) for each in found)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("wish", ["hierarchical(", "hierarchical(4", "hierarchical(0)", "hierarchical(²)", "ring(4)"])
def test_what_is_no_collective_is_refused(wish):
    check_wish("hierarchical(4)")
    with pytest.raises(ValueError, match="is no collective"):
        check_wish(wish)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_workers_meet_at_addresses_of_ipv6_too():
    found = both(lambda engine: connect(engine.rank, 2, "::1", engine.all_gather_text))
    assert [end[1 - rank].family for rank, end in enumerate(found)] == [socket.AF_INET6] * 2
    for rank, end in enumerate(found):
        end[1 - rank].close()
