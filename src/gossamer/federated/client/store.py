"""Client store: what a device keeps between its rounds, in memory or in a directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from gossamer.base.ops import Payload
from gossamer.base.peer_ops import Stamp
from gossamer.federated.messages import Report


@dataclass(frozen=True)
class PendingContribution:
    """A contribution that may have been sent, and whose fate is not known: a restarted device sends it again."""

    stamp: Stamp
    report: Report
    payload: Payload
    counted: ClientState  # what the device's state becomes once it counts


@dataclass
class ClientState:
    """What a device keeps: nothing at first."""

    lineage: str = ""  # of the versions that all this is about
    round: int = -1  # the last whose fate it knows
    version: int = -1  # of the replica
    replica: Payload = ()  # the public blocks of that version: (n,) each
    residuals: tuple[dict[str, Tensor], ...] = ()  # the compressor's state, by block
    residual_version: int = -1  # that the residuals were left at
    memory: dict[str, Tensor] = field(default_factory=dict)  # the strategy's
    told: int = 0  # contributions with noise of its own that may have left it
    pending: PendingContribution | None = None


class ClientStore(Protocol):
    """Where a device's state lies."""

    def load(self) -> ClientState: ...

    def save(self, state: ClientState) -> None: ...


class MemoryStore:
    """In memory: gone with the process."""

    def __init__(self) -> None:
        self._state = ClientState()

    def load(self) -> ClientState:
        return self._state

    def save(self, state: ClientState) -> None:
        self._state = state
