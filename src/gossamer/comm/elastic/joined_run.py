"""Joined run: this process's membership in an elastic run: its agent, its listener and the meshes of its views."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import replace

import torch

from gossamer.base.peer_ops import Peer
from gossamer.comm.elastic.agent import MembershipAgent, read_address
from gossamer.comm.elastic.change import Group
from gossamer.comm.elastic.relay import detour
from gossamer.comm.elastic.served_member import ServedMember
from gossamer.comm.elastic.transport import ElasticTransport
from gossamer.comm.elastic.view_engines import ViewEngines, nccl_group
from gossamer.comm.elastic.view_listener import ViewListener
from gossamer.comm.environment.run_settings import (
    COORDINATOR,
    adopt_servers,
    local_relay,
    own_address,
    own_ipv6_addresses,
)
from gossamer.comm.environment.run_token import run_token
from gossamer.comm.environment.wait_timeout import coordinator_seconds, timeout_seconds
from gossamer.comm.membership.messages import RELAY_SERVER
from gossamer.comm.membership.view import View
from gossamer.comm.mesh.collective_selector import AUTO, CollectivePrices
from gossamer.comm.mesh.connect import shut_down
from gossamer.comm.mesh.device_transport import chooses
from gossamer.comm.mesh.greeter import MembersUnreached
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.sealing import LinkKeys, LinksKeys, agree, mesh_tls
from gossamer.comm.mesh.staged_operations import CPU
from gossamer.comm.mesh.standalone import OwnRoutes, standalone_mesh
from gossamer.comm.mesh.transport import refuse_unlimited
from gossamer.comm.tls_contexts import run_tls
from gossamer.errors import AttachError, ConnectError, PeerLost

MOST_ORDERS = 2**20  # of data, among which each newcomer to a run with servers draws one
ONE_SESSION = (
    "an elastic run supports one session, because newcomers receive one session's state, but this process attaches a "
    "second one. Attach one model that contains both, or run a fixed number of workers: gossamer run --workers 4."
)


class JoinedRun:
    """One worker's membership in an elastic run, from gossamer.init on.

    Raises:
        ConnectError: The coordinator cannot be reached.
        PeerLost: The run does not begin in time.
    """

    def __init__(self) -> None:
        number, place = os.environ.get("GOSSAMER_MEMBER"), os.environ.get("GOSSAMER_PLACE")
        token = run_token()
        if token is None:
            raise ConnectError(
                "this worker has a coordinator but no token, so the coordinator would reject it. Start it with "
                "gossamer run --workers 2:8, or with gossamer run --join HOST:PORT --token-file FILE."
            )
        self._token, self._seconds = token, timeout_seconds()
        self._tls = mesh_tls()
        self._over = -1  # newest view that has ended
        self._transport: ElasticTransport | None = None
        self._served = False  # whether served_member was called
        self._connecting: dict[int, Sequence[socket.socket | None]] = {}  # by stage of a view
        self._measured: tuple[tuple[int, ...], Links] | None = None
        self._prices = CollectivePrices()
        own = own_address()
        self._listener = ViewListener(own, *(each for each in own_ipv6_addresses() if each != own))
        coordinator = read_address(os.environ[COORDINATOR])
        self.agent = MembershipAgent(
            coordinator,
            token,
            place=None if place is None else int(place),
            number=None if number is None else int(number),
            on_change=self._view_over,
            coordinator_seconds=coordinator_seconds(),
            tls=run_tls(),
            dial_from=self._listener.address_towards(coordinator[0]),
        )
        try:
            self.agent.here(*self._listener.addresses, seconds=coordinator_seconds())
            self.first = None if self.agent.formed else self.agent.first_view(self._seconds)
            if self.agent.servers:
                adopt_servers(self.agent.servers, order=0 if self.first else 1 + self.agent.number % MOST_ORDERS)
        except BaseException:
            self.agent.close()
            self._listener.close()
            raise

    @property
    def rank(self) -> int:
        """The rank until attach: in the first view, or the last one of that view for a newcomer. With servers, whose
        newcomers keep their part of the data, a newcomer has any of that view."""
        if self.first is None and self.agent.servers:
            return self.agent.number % self.size
        return self.size - 1 if self.first is None else self.first.rank_of(self.agent.number)

    @property
    def size(self) -> int:
        """Initial number of workers of the run, from which newcomers also compute len(loader) and schedules."""
        return self.agent.began if self.first is None else self.first.world

    @property
    def joins(self) -> bool:
        """Whether this worker joins a run that has begun to train."""
        return self.first is None

    @property
    def most(self) -> int:
        """Maximum number of workers of the run, as of the time when this worker joined."""
        return self.agent.most

    @property
    def sizes(self) -> range:
        """Possible numbers of workers of the run, as of the time when this worker joined."""
        return range(max(self.agent.least, 1), self.most + 1)

    def served_member(self) -> ServedMember:
        """Create the transport of this worker's session if the parameters are on servers. Raises AttachError for a
        second session."""
        if self._served:
            raise AttachError(ONE_SESSION)
        self._served = True
        return ServedMember(self.agent, self.first, self._seconds)

    def transport(self, requested: str, device: torch.device) -> ElasticTransport:
        """Create the transport of this worker's session. `requested`: requested algorithm; `device`: of this worker.

        Raises AttachError for a second session.
        """
        if self._transport is not None:
            raise AttachError(ONE_SESSION)

        if requested == AUTO and device.type != "cpu":
            refuse_unlimited("tensors of GPUs may travel by NCCL")
        engines = ViewEngines(device, own_address(), nccl_group)

        def connect(view: View) -> Group:
            return self._connect(view, requested, device, engines)

        self._transport = ElasticTransport(
            self.agent, connect, self.first, self._seconds, copies=device.type == CPU.type
        )
        if self._over >= 0:
            self._transport.view_over(self._over)
        return self._transport

    def _connect(self, view: View, requested: str, device: torch.device, engines: ViewEngines) -> Group:
        if self._is_over(view):
            raise PeerLost("another view was created")
        rank, members = view.rank_of(self.agent.number), tuple(member.number for member in view.members)
        relays = [detour(self.agent.coordinator, self._token)] if self.agent.relay else []
        relays += [detour((each.host, each.port), self._token, Peer(RELAY_SERVER, each.number)) for each in view.relays]
        sealed: dict[int, LinkKeys] | None = {} if self.agent.seal else None
        relayed: dict[int, int] = {}
        sockets = self._listener.meet(
            view,
            self.agent.number,
            self._token,
            self._seconds,
            lambda: self._is_over(view),
            relays,
            sealed,
            relayed=relayed,
        )
        self._connecting[view.number] = sockets
        try:
            if self._is_over(view):
                shut_down(sockets)
            keys = self._keys(view, rank, sockets) if sealed is None else sealed
            known = self._known(members)
            mesh = standalone_mesh(
                rank,
                sockets,
                requested,
                known,
                gives_notice=rank == 0,
                keys=keys,
                device=device,
                prices=self._prices,
                routes=OwnRoutes(local_relay(), relayed),
            )
            chosen = keys is None and mesh.world > 1 and chooses(requested, mesh.devices)
            group: Group = engines.combine(mesh) if chosen else mesh
        finally:
            del self._connecting[view.number]
        self._measured = members, Links.of(group.links)
        return group

    def _keys(self, view: View, rank: int, sockets: list[socket.socket | None]) -> LinksKeys | None:
        """Agree on keys for the connections, if the run encrypts."""
        if self._tls is None:
            return None
        context = struct.pack("!Q", view.number) + view.secret
        try:
            return agree(rank, sockets, self._tls, self._token, context, over=lambda: self._is_over(view))
        except MembersUnreached as problem:
            unreached = tuple(view.members[each].number for each in problem.unreached)
            raise MembersUnreached(str(problem), unreached) from problem

    def _known(self, members: tuple[int, ...]) -> Links | None:
        """Return the links of these members if all were measured before; equal on all members."""
        if self._measured is None or not set(members) <= set(self._measured[0]):
            return None
        before, links = self._measured
        return replace(links.among([before.index(member) for member in members]), ways=links.ways)

    def _is_over(self, view: View) -> bool:
        return view.number // 2 <= self._over  # view.number encodes the stage as its last bit

    def _view_over(self, number: int) -> None:
        self._over = max(self._over, number)
        for stage, sockets in list(self._connecting.items()):
            if stage // 2 <= self._over:
                shut_down(sockets)  # a silent member would block this worker
        if self._transport is not None:
            self._transport.view_over(number)


_joined: list[JoinedRun] = []


def join_run() -> JoinedRun:
    """Return this process's membership; joins the run at the first call."""
    if not _joined:
        _joined.append(JoinedRun())
    return _joined[0]
