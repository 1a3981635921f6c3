"""Link statistics: the kernel's counters of a mesh's connections, by peer, for observers; training does not use them.

Peers are identified by process, because ranks are not unique: those of a subgroup begin at 0, and those of an elastic
run change with each view.
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
    """Return this process's name in LinksOpened. fixed: whether RANK is valid on all machines for the whole run."""
    rank = os.environ.get("RANK", "") if fixed else ""
    return f"{socket.gethostname()} {os.getpid()} {rank}".rstrip()


def declared(requested: str, *, fixed: bool = True, device: torch.device | None = None) -> str:
    """Encode a rank's announcement before the group is formed: requested algorithm, process and device type."""
    return json.dumps([requested, process_name(fixed=fixed), "cpu" if device is None else device.type])


def parse_declarations(texts: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Decode the announcements: algorithms, processes and device types, by rank."""
    requests, processes, devices = zip(*map(json.loads, texts), strict=True)
    return list(requests), list(processes), list(devices)


class LinkStatistics:
    """Reads the counters of open connections, and keeps the last values when they are about to close.

    Takes about a microsecond per connection.

    Args:
        sockets: By rank; None at this one.
        processes: Process names by rank.
    """

    def __init__(self, sockets: Sequence[socket.socket | None], processes: Sequence[str]) -> None:
        named = zip(processes, sockets, strict=True)
        self._sockets = {process: each for process, each in named if each is not None}
        self._last: Mapping[str, LinkCounters] | None = None

    def read(self) -> Mapping[str, LinkCounters]:
        """Return counters by process. Thread-safe. A connection that closes meanwhile is omitted: a closed socket no
        longer exposes its descriptor, which another file could reuse."""
        if self._last is not None:
            return self._last
        found = {process: link_counters(each) for process, each in self._sockets.items()}
        return {process: counters for process, counters in found.items() if counters is not None}

    def end(self) -> None:
        """Store the last values; the connections are about to close."""
        if self._last is None:
            self._last = self.read()
            self._sockets = {}

    def is_open(self) -> bool:
        return self._last is None


def report_links(mesh: Mesh, sockets: Sequence[socket.socket | None], processes: Sequence[str], links: Links) -> None:
    """Notify observers that a group's connections are open, with the measured links."""
    peers = {name: rank for rank, name in enumerate(processes) if rank != mesh.rank}
    if peers:
        detours = links.detours(mesh.rank)
        statistics = LinkStatistics(sockets, processes)
        mesh.call_before_leaving(statistics.end)
        events.emit(
            LinksOpened(
                round_trips={name: links.round_trips[mesh.rank][rank] for name, rank in peers.items()},
                bytes_per_second={name: links.bits_per_second(mesh.rank, rank) / 8 for name, rank in peers.items()},
                relays={processes[peer]: "" if at is None else processes[at] for peer, at in detours.items()},
                read=statistics.read,
                is_open=statistics.is_open,
            )
        )
