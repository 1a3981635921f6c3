"""Ranks in threads of one process, each with a standalone mesh over loopback: no engine anywhere."""

from __future__ import annotations

import socket

from support.rank_threads import RankThreads

from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.standalone import DIRECT, standalone_mesh


def connected(world):
    """By rank, its connections to all others, as a view's listeners make them."""
    ends = [[None] * world for _ in range(world)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for high in range(world):
            for low in range(high):
                ends[high][low] = socket.create_connection(listener.getsockname())
                ends[low][high], _ = listener.accept()
                for each in (ends[high][low], ends[low][high]):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    each.setblocking(False)
    return ends


def near(world):
    return Links.alike(((0.0001,) * world,) * world, 1e9)


class StandaloneGroup(RankThreads):
    """`world` ranks, each with a thread of its own."""

    def __init__(self, world, wish="auto", known=near, prices=None, links_of=None, routes=None):
        super().__init__(world)
        self.sockets = connected(world)
        links = known(world) if known else None
        tables, ways = prices or [None] * world, routes or [DIRECT] * world
        self.transports = self.all(
            lambda rank: standalone_mesh(
                rank,
                self.sockets[rank],
                wish,
                links if links_of is None else links_of(rank),
                gives_notice=rank == 0,
                prices=tables[rank],
                routes=ways[rank],
            )
        )
