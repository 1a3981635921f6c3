"""Change of view: its description for a member, and the protocols between an elastic transport and its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from gossamer.base.transport import Transport
from gossamer.comm.membership.view import View
from gossamer.errors import ConnectError, PeerLost

FAILURES = (PeerLost, ConnectError)  # of a group that breaks, or cannot be formed


def unreached(failure: Exception) -> Sequence[int]:
    """Return the numbers of the members that a failure names."""
    found: Sequence[int] = getattr(failure, "unreached", ())
    return found


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of view."""

    number: int
    before: tuple[int, ...]  # the members' numbers, by rank
    now: tuple[int, ...]
    standings: Mapping[int, Any]  # position of each member with state, by member number
    seconds: float  # from the detection by this member until the group was formed
    completed: int  # transactions
    finished: bool = False  # whether some members had completed the broken transaction and sent its results to others
    replaces: bool = False  # whether the previous change, from the same members, ended before a transaction

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks in the previous view of the members that are gone."""
        return tuple(rank for rank, number in enumerate(self.before) if number not in self.now)

    @property
    def joined(self) -> int:
        """Number of newcomers."""
        return sum(number not in self.before for number in self.now)


@dataclass
class Base:
    """The base from which a member moves, repeatedly if groups break, until one group completes a transaction."""

    members: tuple[int, ...]
    standing: Any  # None for a newcomer
    left: bool = False  # whether the member has moved from here


@dataclass(frozen=True)
class Resolved:
    """A connected group that its members have not adopted yet."""

    members: tuple[int, ...]
    began: float  # when its formation began
    finished: bool = False


class PutOut(PeerLost):
    """The group broke before an admitted newcomer had contributed."""

    def __init__(self) -> None:
        super().__init__(
            "this worker was admitted and evicted before its first transaction, so its state may differ from the "
            "group's. Restart it; gossamer run --max-restarts 5 does so automatically"
        )


class Group(Transport, Protocol):
    """A transport of one view's members."""

    def deliver(self, outgoing: Mapping[int, Tensor], received: Mapping[int, int]) -> dict[int, Tensor]:
        """Send the uint8 tensor `outgoing[j]` to rank j, and receive `received[j]` bytes from rank j.

        Every rank calls it; the sizes of every pair of ranks must match."""


class RunMembership(Protocol):
    """One worker's membership as an elastic transport needs it; see gossamer.comm.elastic.agent."""

    number: int

    def view_after(self, number: int, seconds: float) -> View: ...
    def attached(self, fingerprint: str) -> None: ...
    def ready(self, fingerprint: str) -> None: ...
    def broken(self, view: int, suspects: Sequence[int], why: str, *, went_on: bool = False) -> None: ...
    def caught_up(self) -> None: ...
    def leave(self, *, finished: bool = False) -> None: ...
    def close(self) -> None: ...


class Trainee(Protocol):
    """The training state behind an elastic transport. Called on the communication thread."""

    def park(self) -> None:
        """Wait until the training thread is parked, so that the state does not change."""

    def standing(self) -> Any:
        """Return this worker's position for all other members, as JSON."""

    def moved(self, change: Change) -> None:
        """Apply a change of view. The training thread is parked."""

    def take_place(self, rank: int, world: int) -> None:
        """Follow a change of this member's rank or of the number of members, before `rescale`."""

    def rescale(self, before: int, now: int) -> None:
        """Rescale pending contributions, which will be divided by another number of workers."""

    def nbytes(self) -> int:
        """Return the size of the model, equal on all members."""

    def version(self) -> str:
        """Return a text, equal on all members, that changes with the state that they have in common. Empty if each
        step changes it, or if a newcomer needs the whole state of one moment."""

    def hand_over(self) -> tuple[Any, Any, Any]:
        """Return the state for a newcomer: (replicated, specific to this worker, local). The local part may be that of
        an earlier moment of the same `version`. Texts, tensors, lists and tuples."""

    def take_over(self, alike: Any, own: Any, local: Any) -> None:
        """Load the state that another worker's `hand_over` returned."""

    def state_hash(self) -> str:
        """Return a hash of the replicated state (parameters, optimizer): equal to that of the worker whose state a
        newcomer has taken over. Empty if this worker's state is its own."""
