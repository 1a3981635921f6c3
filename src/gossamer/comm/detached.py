"""Detached transport: for a worker after its group has continued without it. Rejects collective operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from gossamer.base.ops import CollectiveOp
from gossamer.errors import GossamerError, PeerLost


class DetachedTransport:
    """Transport of a restarted worker, which receives the state from servers or a neighbor.

    Gathered texts are therefore this rank's, repeated, and a broadcast leaves tensors unchanged.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.links = rank, world, ""

    def answer(self, op: CollectiveOp) -> NoReturn:
        raise self._gone()

    def begin(self, op: CollectiveOp) -> NoReturn:
        raise self._gone()

    def make_progress(self) -> bool:
        """Return False: there are no pending operations."""
        return False

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Do nothing: the tensors come from the servers or a neighbor."""

    def all_gather_text(self, text: str) -> list[str]:
        """Return this rank's text for every rank."""
        return [text] * self.world

    def part(self, size: int) -> NoReturn:
        raise self._gone()

    def close(self) -> None:
        """Do nothing: there is no group."""

    def _gone(self) -> GossamerError:
        return PeerLost(
            f"rank {self.rank} of {self.world} was lost and restarted, and its group no longer exists, so collective "
            "operations fail. Only separate parameter servers or pairwise gossip can readmit a worker: "
            "ParameterServer(), or Gossip('pairwise')."
        )
