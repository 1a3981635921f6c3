"""The Transport protocol: answers the collective operations of one worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from gossamer.base.ops import CollectiveOp


class Transport(Protocol):
    """One worker's access to a lock-step group. Calls come from one thread, in the same order on every rank.

    The tensors of an operation belong to the transport until the answer is there. A failure of the group raises
    PeerLost.
    """

    rank: int
    world: int
    links: str  # measurements that the last bits of sums follow from; a resumed run gives them back

    def answer(self, op: CollectiveOp) -> Any:
        """Perform one operation and wait for its answer."""

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        """Begin one operation; the function returned waits for its answer, and is called once.

        Several may be under way. They are begun, and waited for, in the same order on every rank.
        """

    def make_progress(self) -> bool:
        """Advance pending operations for a moment, where that is left to this thread; False where nothing is."""

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrite `tensors` with those of `source`, bit for bit."""

    def all_gather_text(self, text: str) -> list[str]:
        """All ranks' texts, by rank; lengths may differ."""

    def part(self, size: int) -> Transport:
        """A transport over this rank's block of `size` consecutive ranks. Every rank must ask at the same place."""

    def close(self) -> None:
        """Leave the group."""
