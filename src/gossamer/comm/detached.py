"""Detached transport: of a worker whose group has gone on without it; collective operations are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from gossamer.base.ops import CollectiveOp
from gossamer.errors import PeerLost


class DetachedTransport:
    """Rank `rank` of `world`, which was lost and came back. What ranks have in common comes from servers or a neighbor.

    So texts are gathered as if all ranks gave this one's, and a broadcast leaves tensors as they are.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.links = rank, world, ""

    def answer(self, op: CollectiveOp) -> NoReturn:
        raise self._gone()

    def begin(self, op: CollectiveOp) -> NoReturn:
        raise self._gone()

    def make_progress(self) -> bool:
        """There are no pending operations."""
        return False

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """They come from the servers, or from a neighbor, instead."""

    def all_gather_text(self, text: str) -> list[str]:
        """Its own text, as if all ranks gave it."""
        return [text] * self.world

    def part(self, size: int) -> NoReturn:
        raise self._gone()

    def close(self) -> None:
        """There is nothing to leave."""

    def _gone(self) -> PeerLost:
        return PeerLost(
            f"rank {self.rank} of {self.world} was lost and came back, and the group that it belonged to is gone, so "
            "nobody answers it. Only parameter servers of their own, or single neighbours, take a worker back: "
            "ParameterServer(), or Gossip('pairwise')."
        )
