"""Which pairs of routers let two workers connect directly: listener, agent and coordinator in network namespaces."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

import pytest
from support.homes import (
    ADDRESS,
    CARRIER,
    FULL_CONE,
    OFFICE,
    PORT,
    PORT_ONLY,
    PRIVATE,
    SYMMETRIC,
    Internet,
    internet,
    missing,
)
from support.nightly import nightly

from gossamer.base.peer_ops import Peer
from gossamer.cli.doctor_link import examine
from gossamer.comm.elastic.agent import MembershipAgent
from gossamer.comm.elastic.coordinator_server import CoordinatorServer
from gossamer.comm.elastic.relay import RelayServer, detour
from gossamer.comm.elastic.view_listener import ViewListener
from gossamer.comm.environment.network_interfaces import global_ipv6_addresses
from gossamer.comm.membership.invitations import Welcome
from gossamer.comm.membership.messages import RELAY_SERVER
from gossamer.comm.membership.next_view import CoordinatorOptions
from gossamer.comm.mesh.greeter import MembersUnreached
from gossamer.launcher.rendezvous import in_namespace

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(bool(missing()), reason=missing() or "nothing is missing"),
]

TOKEN = bytes(range(32))


def serve(net: Internet, count: int, *, relays: bool) -> CoordinatorServer:
    """A coordinator in the office."""

    def begin() -> CoordinatorServer:
        return CoordinatorServer(
            CoordinatorOptions(least=count, most=count, initial=count, relays=relays),
            token=TOKEN,
            address=OFFICE,
            port=PORT,
            journal=None,
            note=lambda text: None,
            welcome=Welcome(token=bytes(40), addresses=()),
        )

    return in_namespace(net.path("office"), begin)


class Run:
    """Workers on machines of an internet, as threads of this process in the network namespaces of the machines."""

    def __init__(self, net: Internet, machines: Sequence[str], *, relays: bool) -> None:
        self._net, self._machines, self._relays = net, machines, relays

    def peers(
        self, seconds: float = 60.0, prepare: Callable[[CoordinatorServer], object] = lambda server: None
    ) -> list[list[str]]:
        """The host at the other end of each connection, by rank. Raises MembersUnreached.

        prepare: called before the workers start.
        """
        count = len(self._machines)
        with closing(serve(self._net, count, relays=self._relays)) as server, ThreadPoolExecutor(count) as pool:
            prepare(server)
            tickets: list[Future[list[str]]] = [
                pool.submit(in_namespace, self._net.path(machine), lambda place=place: self._worker(place, seconds))
                for place, machine in enumerate(self._machines)
            ]
            return [ticket.result() for ticket in tickets]

    def _worker(self, place: int, seconds: float) -> list[str]:
        with ExitStack() as held:
            address = OFFICE if self._machines[place] == "office" else PRIVATE
            listener = held.enter_context(closing(ViewListener(address, *global_ipv6_addresses("eth0"))))
            source = listener.address_towards(OFFICE)
            agent = MembershipAgent((OFFICE, PORT), TOKEN, place=place, number=1000 + place, dial_from=source)
            held.callback(agent.close)
            agent.here(*listener.addresses)
            view = agent.first_view(60.0)
            ways = [detour((OFFICE, PORT), TOKEN)] if agent.relay else []
            ways += [detour((each.host, each.port), TOKEN, Peer(RELAY_SERVER, each.number)) for each in view.relays]
            hosts = []
            for number in (view.number, view.number + 1):
                open_sockets: list[socket.socket | None] = []
                for whole in (False, True):  # both are open while newcomers are admitted
                    stage = replace(view, number=number).stage(whole=whole)
                    sockets = listener.meet(stage, agent.number, TOKEN, seconds, lambda: False, ways)
                    exchange(place, sockets)
                    hosts.append([each.getpeername()[0] for each in sockets if each is not None])
                    open_sockets += sockets
                for each in filter(None, open_sockets):
                    each.close()
            assert hosts == [hosts[0]] * 4
            return hosts[0]


def test_workers_with_ipv6_connect_by_it_if_their_routers_prevent_ipv4() -> None:
    with internet(SYMMETRIC, SYMMETRIC) as net:
        net.add_ipv6()
        ends = Run(net, ["home1", "home2"], relays=False).peers()
    assert ends == [["2001:db8:2::5"], ["2001:db8:1::5"]]


def test_workers_connect_by_a_relay_behind_a_forwarded_port_if_the_first_machine_is_slower() -> None:
    with internet(FULL_CONE, SYMMETRIC, SYMMETRIC) as net, ExitStack() as held:

        def begin_relay(server: CoordinatorServer) -> None:
            assert server._relay is not None
            server._relay._name = lambda end: None  # type: ignore[method-assign]  # it pairs no workers
            begin = partial(RelayServer, (OFFICE, PORT), TOKEN, (PRIVATE, 29800), [("203.0.113.11", 29800)], print)
            held.enter_context(closing(in_namespace(net.path("home1"), begin)))
            while not server._coordinator.relays:
                time.sleep(0.005)

        found = Run(net, ["home2", "home3"], relays=True).peers(prepare=begin_relay)
        assert found == [["203.0.113.11"], ["203.0.113.11"]]


@pytest.mark.parametrize(
    ("own", "other", "relays", "way"),
    [
        (SYMMETRIC, FULL_CONE, False, "directly, at 203.0.113.12:"),
        (PORT_ONLY, CARRIER, False, "hole punching"),
        (SYMMETRIC, PORT_ONLY, True, "by the relay"),
        (PORT_ONLY, SYMMETRIC, False, ""),
    ],
)
def test_doctor_names_the_way_to_each_worker(own: str, other: str, relays: bool, way: str) -> None:
    with internet(own, other) as net, closing(serve(net, 1, relays=relays)) as server, ExitStack() as held:

        def join() -> None:
            listener = held.enter_context(closing(ViewListener(PRIVATE)))
            source = listener.address_towards(OFFICE)
            agent = held.enter_context(closing(MembershipAgent((OFFICE, PORT), TOKEN, dial_from=source)))
            agent.here(*listener.addresses)
            agent.first_view(60.0)

        in_namespace(net.path("home2"), join)
        assert server.invitations is not None
        link = server.invitations.create(None, None)
        report = in_namespace(net.path("home1"), lambda: examine(link, None))
    (member,) = report.members
    assert way in report.way_to(member)
    assert report.healthy is bool(way) is bool(report.way_to(member))


def test_a_worker_whose_public_address_changes_stays_a_member_and_is_reached_at_the_new_one() -> None:
    """Its connections break. The one to the coordinator returns within the failure timeout."""
    with internet(PORT_ONLY) as net, closing(serve(net, 2, relays=False)) as server, ExitStack() as held:

        def join(place: int, address: str) -> tuple[ViewListener, MembershipAgent]:
            listener = held.enter_context(closing(ViewListener(address)))
            source = listener.address_towards(OFFICE)
            agent = MembershipAgent((OFFICE, PORT), TOKEN, place=place, number=1000 + place, dial_from=source)
            held.enter_context(closing(agent))
            agent.here(*listener.addresses)
            return listener, agent

        def meet(machine: str, worker: tuple[ViewListener, MembershipAgent], after: int) -> list[str]:
            listener, agent = worker
            view = agent.view_after(after, 60.0).stage()
            sockets = in_namespace(
                net.path(machine), lambda: listener.meet(view, agent.number, TOKEN, 60.0, lambda: False)
            )
            exchange(view.rank_of(agent.number), sockets)
            for each in filter(None, sockets):
                each.close()
            return [host for member in view.members for host, _ in member.addresses]

        workers = {
            machine: in_namespace(net.path(machine), lambda place=place, address=address: join(place, address))
            for place, (machine, address) in enumerate({"office": OFFICE, "home1": PRIVATE}.items())
        }

        def all_meet(after: int) -> list[list[str]]:
            with ThreadPoolExecutor(2) as pool:
                return [*pool.map(lambda each: meet(*each, after), workers.items())]

        assert all_meet(0) == [[OFFICE, PRIVATE, "203.0.113.11"]] * 2
        net.change_address(1, "203.0.113.21")
        for _, agent in workers.values():
            agent.broken(1, (), "the connections broke")
        assert all_meet(1) == [[OFFICE, PRIVATE, "203.0.113.21"]] * 2
        assert server.members == {1000, 1001}


def exchange(place: int, sockets: Sequence[socket.socket | None]) -> None:
    """Every pair has one connection: its ends receive each other's ranks."""
    for peer, each in enumerate(sockets):
        if each is not None:
            each.setblocking(True)
            each.settimeout(20.0)
            each.sendall(bytes([place, peer]))
    for peer, each in enumerate(sockets):
        assert each is None or each.recv(2, socket.MSG_WAITALL) == bytes([peer, place])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FULL_CONE, SYMMETRIC),
        (SYMMETRIC, FULL_CONE),
        (SYMMETRIC, ADDRESS),
        (PORT_ONLY, PORT_ONLY),
        (CARRIER, PORT_ONLY),
        *nightly((FULL_CONE, FULL_CONE), (ADDRESS, SYMMETRIC), (ADDRESS, PORT_ONLY), (CARRIER, CARRIER)),
    ],
)
def test_workers_behind_these_routers_connect_directly(first: str, second: str) -> None:
    with internet(first, second) as net:
        ends = Run(net, ["home1", "home2"], relays=False).peers()
    assert ends == [["203.0.113.12"], ["203.0.113.11"]]


def test_a_firewall_that_remembers_connections_does_not_prevent_direct_ones() -> None:
    with internet(PORT_ONLY) as net:
        assert Run(net, ["office", "home1"], relays=False).peers() == [["203.0.113.11"], [OFFICE]]


@pytest.mark.parametrize(
    ("first", "second"), [(SYMMETRIC, PORT_ONLY), *nightly((SYMMETRIC, SYMMETRIC), (CARRIER, SYMMETRIC))]
)
def test_workers_behind_other_routers_connect_by_the_relay(first: str, second: str) -> None:
    with internet(first, second) as net:
        assert Run(net, ["home1", "home2"], relays=True).peers() == [[OFFICE], [OFFICE]]
        with pytest.raises(MembersUnreached, match="not reached"):
            Run(net, ["home1", "home2"], relays=False).peers(seconds=4.0)
