"""Device states: keeps what simulated devices keep, in memory or on disk; equal replicas are kept once.

All replicas of one version are the same bits, so memory grows with the versions that devices hold, not with devices.
Residuals and the strategy's memory are each device's own: with a directory they lie there while it is not chosen. What
was sent when a device left, and what it then remembers, stays in memory until its fate is known.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from gossamer.base.ops import Payload
from gossamer.federated.client.store import ClientState, ClientStore, DirectoryStore


class DeviceStates:
    """Of all devices; one that was never chosen costs nothing."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """directory: for what is each device's own; None: in memory."""
        self._directory = directory
        self._kept: dict[int, ClientState] = {}
        self._written: set[int] = set()  # who has a file
        self._replicas: dict[int, tuple[Payload, int]] = {}  # by version: the blocks, and how many devices hold them

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def replicas(self) -> int:
        """How many versions are held."""
        return len(self._replicas)

    def known(self, client: int) -> bool:
        """Whether it ever was chosen."""
        return client in self._kept

    def of(self, client: int) -> ClientStore:
        return _Own(self, client)

    def load(self, client: int) -> ClientState:
        """Raises CheckpointError for a damaged file."""
        kept = self._kept.get(client, ClientState())
        if self._directory is None or client not in self._written:
            return kept
        own = DirectoryStore(self._directory, client).load()
        return replace(kept, residuals=own.residuals, memory=own.memory)

    def save(self, client: int, state: ClientState, last: ClientState) -> None:
        """last: the state before; unchanged residuals are not written. Raises CheckpointError for a full disk."""
        small = state
        if self._directory is not None:
            changed = state.residuals is not last.residuals or state.memory is not last.memory
            if changed and (client in self._written or any(state.residuals) or state.memory):
                self._written.add(client)
                DirectoryStore(self._directory, client, durable=False).save(replace(state, replica=()))
            small = replace(state, residuals=(), memory={})
        replica = self._held(state.version, state.replica)
        pending = state.pending
        if pending is not None and pending.counted.version == state.version:  # what counts has the same replica
            pending = replace(pending, counted=replace(pending.counted, replica=replica))
        self._release(self._kept.get(client))
        self._kept[client] = replace(small, replica=replica, pending=pending)

    def _held(self, version: int, replica: Payload) -> Payload:
        if not replica:
            return replica
        blocks, holders = self._replicas.get(version, (replica, 0))
        if not all(map(torch.equal, blocks, replica)):  # no server publishes that; NaN is not equal either
            return replica
        self._replicas[version] = blocks, holders + 1
        return blocks

    def _release(self, state: ClientState | None) -> None:
        if state is None or not state.replica:
            return
        blocks, holders = self._replicas.get(state.version, ((), 0))
        if blocks is not state.replica:
            return
        if holders > 1:
            self._replicas[state.version] = blocks, holders - 1
        else:
            del self._replicas[state.version]


class _Own(ClientStore):
    """One device's."""

    def __init__(self, states: DeviceStates, client: int) -> None:
        self._states, self._client, self._last = states, client, ClientState()

    def load(self) -> ClientState:
        self._last = self._states.load(self._client)
        return self._last

    def save(self, state: ClientState) -> None:
        self._states.save(self._client, state, self._last)
        self._last = state
