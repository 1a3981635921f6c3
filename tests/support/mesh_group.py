"""Ranks in threads of one process, connected over loopback."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import torch
from support.rank_threads import RankThreads

from gossamer.algorithms.collectives import DirectAllReduce
from gossamer.comm.mesh.collective_selector import CollectiveSelector
from gossamer.comm.mesh.connect import connect
from gossamer.comm.mesh.link_measurement import Links
from gossamer.comm.mesh.native_mesh import Mesh
from gossamer.comm.mesh.operations import MeshOperations
from gossamer.comm.mesh.sealing import AES, LinkKeys
from gossamer.comm.mesh.shared_memory import share
from gossamer.comm.mesh.transport import EngineFallback, MeshTransport, advice, mesh_transport
from gossamer.comm.simulated import SimulatedGroup

MESSAGE = 2**18  # bytes


class Always(CollectiveSelector):
    """Picks the same table for all means, but for those of half precision."""

    def __init__(self, table, world):
        super().__init__(table, Links.alike(((0.0,) * world,) * world, 1e9))


class Group(RankThreads):
    """`world` ranks on loopback, each with a thread of its own."""

    def __init__(self, world, collective=None):
        super().__init__(world)
        self.engines = SimulatedGroup(world, patience_seconds=20.0).transports
        self.sockets = self.all(lambda rank: connect(rank, world, "127.0.0.1", self.engines[rank].all_gather_text))
        picker = Always(collective or DirectAllReduce(), world)
        self.meshes = self.all(self.mesh)
        self.transports = [
            MeshTransport(MeshOperations(mine, picker, advice(mine.rank)), EngineFallback(engine, mesh_transport))
            for engine, mine in zip(self.engines, self.meshes, strict=True)
        ]

    def mesh(self, rank):
        return Mesh(rank, self.sockets[rank])


class SharedGroup(Group):
    """As workers of one machine: messages lie in memory that both ends see."""

    def mesh(self, rank):
        return Mesh(
            rank, self.sockets[rank], shared=share(rank, self.sockets[rank], self.engines[rank].all_gather_text)
        )


def link_keys(rank, peer, cipher=AES):
    """Without a handshake: a key for each way."""
    told, heard = (hashlib.sha256(f"{a} to {b}".encode()).digest() for a, b in ((rank, peer), (peer, rank)))
    return LinkKeys(cipher, told, heard)


def keys_of(rank, sockets, cipher=AES):
    return {peer: link_keys(rank, peer, cipher) for peer, each in enumerate(sockets) if each is not None}


class SealedGroup(Group):
    """As with --tls, with keys that were not agreed."""

    def mesh(self, rank):
        return Mesh(rank, self.sockets[rank], keys=keys_of(rank, self.sockets[rank]))


class SealedSharedGroup(SharedGroup):
    """As with --tls on one machine: only headers go through sockets, and are sealed."""

    def mesh(self, rank):
        shared = share(rank, self.sockets[rank], self.engines[rank].all_gather_text)
        return Mesh(rank, self.sockets[rank], shared=shared, keys=keys_of(rank, self.sockets[rank]))


def whole_numbers(world, numel, dtype=torch.float32):
    return [torch.arange(numel).mul(rank + 3).remainder(113).mul(world).to(dtype) for rank in range(world)]


def payload(rank, extra=0):
    return torch.full((3,), rank, dtype=torch.uint8), torch.full((MESSAGE // 8 + extra, 2), 1.5 + rank)


def same(heard, expected):
    return all(
        torch.equal(a, b) for one, other in zip(heard, expected, strict=True) for a, b in zip(one, other, strict=True)
    )


def both(act):
    """What two ranks come to, in threads of their own."""
    engines = SimulatedGroup(2, patience_seconds=10.0).transports
    with ThreadPoolExecutor(2) as pool:
        tickets = [pool.submit(act, engine) for engine in engines]
        return [ticket.exception(20) or ticket.result() for ticket in tickets]
