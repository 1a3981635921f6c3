"""Collective preference: asks a transport to take another collective from now on, where it has a choice."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from gossamer.base.transport import Transport


@runtime_checkable
class ChoosesCollectives(Protocol):
    """A transport whose means may take one of several tables of hops."""

    def prefer(self, wish: str) -> None: ...


def prefer_collective(transport: Transport, wish: str) -> None:
    """Between two operations, on all ranks alike. An engine's own collectives are what they are, as at attach.

    Raises ValueError for what is no collective.
    """
    if isinstance(transport, ChoosesCollectives):
        transport.prefer(wish)
