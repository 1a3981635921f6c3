"""Device states: the state of simulated devices, in memory or on disk; equal replicas are stored once.

All replicas of one version have the same bits, so memory grows with the number of versions in use, not with the number
of devices. Residuals and the strategy's memory are separate for each device. With a directory they are on disk while
the device is not chosen. A pending contribution, and the state after it, stay in memory until the outcome is known.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from gossamer.base.ops import Payload
from gossamer.federated.client.store import ClientState, ClientStore, DirectoryStore


class DeviceStates:
    """State of all devices; a device that was never chosen needs no memory."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        """directory: for residuals and the strategy's memory; None: in memory."""
        self._directory = directory
        self._kept: dict[int, ClientState] = {}
        self._written: set[int] = set()  # devices with a file
        self._replicas: dict[int, tuple[Payload, int]] = {}  # by version: the blocks, and the number of holders

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def replicas(self) -> int:
        """Number of stored versions."""
        return len(self._replicas)

    def known(self, client: int) -> bool:
        """Whether the device was ever chosen."""
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
        """Save a state. last: the previous state; unchanged residuals are not written. Raises CheckpointError if the
        disk is full."""
        small = state
        if self._directory is not None:
            changed = state.residuals is not last.residuals or state.memory is not last.memory
            if changed and (client in self._written or any(state.residuals) or state.memory):
                self._written.add(client)
                DirectoryStore(self._directory, client, durable=False).save(replace(state, replica=()))
            small = replace(state, residuals=(), memory={})
        replica = self._held(state.version, state.replica)
        pending = state.pending
        if pending is not None and pending.counted.version == state.version:  # `counted` has the same replica
            pending = replace(pending, counted=replace(pending.counted, replica=replica))
        self._release(self._kept.get(client))
        self._kept[client] = replace(small, replica=replica, pending=pending)

    def _held(self, version: int, replica: Payload) -> Payload:
        if not replica:
            return replica
        blocks, holders = self._replicas.get(version, (replica, 0))
        if not all(map(torch.equal, blocks, replica)):  # differs, or has NaN
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
    """The store of one device."""

    def __init__(self, states: DeviceStates, client: int) -> None:
        self._states, self._client, self._last = states, client, ClientState()

    def load(self) -> ClientState:
        self._last = self._states.load(self._client)
        return self._last

    def save(self, state: ClientState) -> None:
        self._states.save(self._client, state, self._last)
        self._last = state
