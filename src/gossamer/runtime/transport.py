"""What a transport is: something that answers words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from gossamer.core.ops import CollectiveOp


class Transport(Protocol):
    """Answers the words of one worker in a lock-step group. Calls come from one thread, in the same order everywhere.

    A tensor that was handed over in a word belongs to the transport until the answer is there. A failure of the group
    raises PeerLost.
    """

    rank: int
    world: int
    links: str  # what was found out that the last bits of sums follow from; a run that is resumed gives it back

    def answer(self, op: CollectiveOp) -> Any:
        """Say one word and wait for its answer."""

    def begin(self, op: CollectiveOp) -> Callable[[], Any]:
        """Begin to say one word; the function returned waits for its answer, and is called once.

        Several may be under way. They are begun, and waited for, in the same order on every rank.
        """

    def make_progress(self) -> bool:
        """Let what was begun go on for a moment, where that is left to this thread; False where nothing is."""

    def broadcast_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrite `tensors` with those of `source`, bit for bit."""

    def all_gather_text(self, text: str) -> list[str]:
        """Everyone's text, by rank; lengths may differ."""

    def part(self, size: int) -> Transport:
        """A transport over this rank's block of `size` neighbouring ranks. Every rank must ask at the same place."""

    def close(self) -> None:
        """Leave the group."""
