"""Client store: what a device keeps between its rounds, in memory or in a directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from gossamer.core.ops import Payload


@dataclass(frozen=True)
class PendingUpload:
    """A contribution whose fate is not known yet, as it is sent: identical bytes, whoever starts in between."""

    round: int
    version: int  # that it was computed from
    report: str  # as JSON
    payload: Payload
    residuals: tuple[dict[str, Tensor], ...]  # the compressor's state once it is counted
    memory: dict[str, Tensor]  # the strategy's once it is counted


@dataclass
class ClientState:
    """What a device keeps: nothing at first."""

    round: int = -1  # the last whose fate it knows
    version: int = -1  # of the replica
    replica: Payload = ()  # the public blocks of that version: (n,) each
    residuals: tuple[dict[str, Tensor], ...] = ()  # the compressor's state, by block
    residual_version: int = -1  # that the residuals were left at
    memory: dict[str, Tensor] = field(default_factory=dict)  # the strategy's
    pending: PendingUpload | None = None  # where a contribution is on its way and uploads are kept


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
