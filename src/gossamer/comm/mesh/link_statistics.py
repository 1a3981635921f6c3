"""Link statistics: the kernel's counters of a mesh's connections, by peer, for whoever watches; training asks nothing.

Peers are named by process, since ranks of a group are places: those of a part of it begin at 0 again, and those of an
elastic run move with its views.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence

import torch

from gossamer import events
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.native_mesh import Mesh
from gossamer.comm.mesh.tcp_info import link_counters
from gossamer.events import LinkCounters, LinksOpened


def process_name(*, fixed: bool = True) -> str:
    """This process as LinksOpened names it. fixed: whether its RANK means it on all machines, and for the whole run."""
    rank = os.environ.get("RANK", "") if fixed else ""
    return f"{socket.gethostname()} {os.getpid()} {rank}".rstrip()


def declared(wish: str, *, fixed: bool = True, device: torch.device | None = None) -> str:
    """What a rank tells all others before a group stands: its wish for a collective, its process, and its device."""
    return json.dumps([wish, process_name(fixed=fixed), "cpu" if device is None else device.type])


def heard(texts: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Wishes, processes and kinds of devices, by rank."""
    wishes, processes, devices = zip(*map(json.loads, texts), strict=True)
    return list(wishes), list(processes), list(devices)


class LinkStatistics:
    """Reads the counters of open connections, and keeps the last ones when they are about to be closed.

    sockets: by rank, None at this one; processes: names by rank. About a microsecond a connection.
    """

    def __init__(self, sockets: Sequence[socket.socket | None], processes: Sequence[str]) -> None:
        named = zip(processes, sockets, strict=True)
        self._sockets = {process: each for process, each in named if each is not None}
        self._last: Mapping[str, LinkCounters] | None = None

    def read(self) -> Mapping[str, LinkCounters]:
        """Any thread may. A connection that is closed meanwhile is left out: its number may be another file's, but a
        Python socket that is closed knows that it is."""
        if self._last is not None:
            return self._last
        found = {process: link_counters(each) for process, each in self._sockets.items()}
        return {process: counters for process, counters in found.items() if counters is not None}

    def end(self) -> None:
        """Connections are about to be closed."""
        if self._last is None:
            self._last = self.read()
            self._sockets = {}

    def is_open(self) -> bool:
        return self._last is None


def tell_links(mesh: Mesh, sockets: Sequence[socket.socket | None], processes: Sequence[str], links: Links) -> None:
    """Let observers know that a group's connections stand, and what was measured of them."""
    peers = {name: rank for rank, name in enumerate(processes) if rank != mesh.rank}
    if peers:
        statistics = LinkStatistics(sockets, processes)
        mesh.call_before_leaving(statistics.end)
        events.emit(
            LinksOpened(
                round_trips={name: links.round_trips[mesh.rank][rank] for name, rank in peers.items()},
                bytes_per_second={name: min(links.up[mesh.rank], links.down[rank]) / 8 for name, rank in peers.items()},
                read=statistics.read,
                is_open=statistics.is_open,
            )
        )
