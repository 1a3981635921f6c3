"""Change of view: describes what a member sees of another view, and what a group asks of its parts meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from gossamer.base.transport import Transport
from gossamer.comm.membership.view import View
from gossamer.errors import ConnectError, PeerLost

FAILURES = (PeerLost, ConnectError)  # of a group that breaks, or cannot be made


def unreached(failure: Exception) -> Sequence[int]:
    """Numbers of the members that a failure names."""
    found: Sequence[int] = getattr(failure, "unreached", ())
    return found


@dataclass(frozen=True, kw_only=True)
class Change:
    """Another view."""

    number: int
    before: tuple[int, ...]  # the members' numbers, by rank
    now: tuple[int, ...]
    standings: Mapping[int, Any]  # what each member with a state told of itself, by its number
    seconds: float  # from when this member noticed until the group stood
    completed: int  # transactions
    finished: bool = False  # whether some had completed the transaction that broke, and gave the others its answers
    replaces: bool = False  # whether the change before, from the same members, did not last until a transaction

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks in the view before of those who are not here any more."""
        return tuple(rank for rank, number in enumerate(self.before) if number not in self.now)

    @property
    def joined(self) -> int:
        """How many newcomers there are."""
        return sum(number not in self.before for number in self.now)


@dataclass
class Base:
    """From where a member moves to another group, as often as groups break until one has completed a transaction."""

    members: tuple[int, ...]
    standing: Any  # None of a newcomer
    left: bool = False  # whether it has moved from there


@dataclass(frozen=True)
class Resolved:
    """A group that stands, and that its members have not adopted yet."""

    members: tuple[int, ...]
    began: float  # the moment when its forming did
    finished: bool = False


class PutOut(PeerLost):
    """A newcomer was let in by some, and then the group broke before it had contributed anything."""

    def __init__(self) -> None:
        super().__init__(
            "this worker was let in and put out again at once, so what it has may be another state than the group's. "
            "Start it again: gossamer run --max-restarts 5 does so by itself"
        )


class Group(Transport, Protocol):
    """A transport of one view's members."""

    def deliver(self, told: Mapping[int, Tensor], heard: Mapping[int, int]) -> dict[int, Tensor]:
        """Send told[j], (bytes,) of uint8, to rank j, and take heard[j] bytes from rank j. Every rank calls it, and
        what two ranks say of each other fits together."""


class RunMembership(Protocol):
    """One worker's place among all, as the coordinator sees it: gossamer.comm.elastic.agent."""

    number: int

    def view_after(self, number: int, seconds: float) -> View: ...
    def attached(self, fingerprint: str) -> None: ...
    def ready(self, fingerprint: str) -> None: ...
    def broken(self, view: int, suspects: Sequence[int], why: str, *, went_on: bool = False) -> None: ...
    def caught_up(self) -> None: ...
    def leave(self, *, finished: bool = False) -> None: ...
    def close(self) -> None: ...


class Trainee(Protocol):
    """What trains over an elastic transport. It is asked and told on the communication thread."""

    def park(self) -> None:
        """Wait until the training thread waits, so that nothing moves."""

    def standing(self) -> Any:
        """Where this worker stands, for all others: JSON."""

    def moved(self, change: Change) -> None:
        """There is another view. The training thread waits."""

    def rescale(self, before: int, now: int) -> None:
        """What is still to be sent will be divided by another number of workers."""

    def hand_over(self) -> tuple[Any, Any]:
        """What a newcomer needs: what all members have alike, and this worker's own. Texts, tensors, lists, tuples."""

    def take_over(self, alike: Any, own: Any) -> None:
        """Go on from what `hand_over` gave elsewhere."""

    def state_hash(self) -> str:
        """Of all that members hold alike."""
