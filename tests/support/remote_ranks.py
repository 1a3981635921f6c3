"""Remote hubs of several ranks in this process, over endpoints on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tests.support.rpc_endpoints import endpoint
from torch import nn

from gossamer.base.peer_ops import WORKER, Peer
from gossamer.train.parallel.remote import RemoteModule, place_remotely
from gossamer.train.parallel.remote_hub import RemoteHub

DEAD_SECONDS = 20.0  # of a busy machine; who closes says goodbye


class RemoteRanks:
    """Each rank's hub; rank r's script is whoever uses hubs[r]."""

    def __init__(self, hubs: list[RemoteHub]) -> None:
        self.hubs = hubs

    def place(self, make: Callable[[], nn.Module], rank: int, **settings: Any) -> list[RemoteModule]:
        """What each rank's call of `remote` returns; the owner's comes first, or others would wait for it."""
        owner = place_remotely(self.hubs[rank], make(), rank, **settings)
        return [
            owner if each == rank else place_remotely(hub, None, rank, **settings) for each, hub in enumerate(self.hubs)
        ]


@contextmanager
def remote_ranks(world: int) -> Iterator[RemoteRanks]:
    with ExitStack() as stack:
        endpoints = [
            endpoint(Peer(WORKER, rank), dead_after_seconds=DEAD_SECONDS, goodbye_seconds=1.0, asks_end_with_peer=True)
            for rank in range(world)
        ]
        hubs = [RemoteHub(each, rank, world) for rank, each in enumerate(endpoints)]
        for each, hub in zip(endpoints, hubs, strict=True):
            stack.callback(hub.close)
            each.meet({other.me: other.address for other in endpoints})
        yield RemoteRanks(hubs)
