"""Collective preference: changes the all-reduce algorithm of a transport during training, if it supports several."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from gossamer.base.transport import Transport


@runtime_checkable
class ChoosesCollectives(Protocol):
    """A transport that can compute means with several all-reduce algorithms."""

    def prefer(self, wish: str) -> None: ...


def prefer_collective(transport: Transport, wish: str) -> None:
    """Change the algorithm, between two operations and equally on all ranks. Engines keep their own collectives.

    Raises ValueError for an unknown algorithm.
    """
    if isinstance(transport, ChoosesCollectives):
        transport.prefer(wish)
