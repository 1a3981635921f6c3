"""Transaction: the operations of one exchange, completed or repeated as a whole if the group changes in between.

A transaction ends with an operation that depends on every rank. The numbers of completed transactions therefore differ
by at most one, and a rank that has completed one can send the others every result that they miss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from gossamer.errors import MismatchError

T = TypeVar("T")


class Regrouped(Exception):
    """The group has changed, and no rank has completed the current transaction, which is repeated from its start."""


class Recovery(Protocol):
    """A group with changing members. Its transactions follow each other, in the same order on every rank."""

    @property
    def members(self) -> tuple[int, ...]:
        """By rank, a number that identifies the member uniquely."""

    @property
    def awaited(self) -> bool:
        """Whether newcomers waited for admission when the current transaction was entered; equal on every rank."""

    def enter(self, *, admits: bool) -> None:
        """Begin or repeat a transaction. Raises PeerLost.

        admits: newcomers may be admitted before it if all ranks agree. The training thread will then wait for it, with
        parameters and optimizer between two steps.
        """

    def complete(self) -> None:
        """End the transaction: all of its operations have results."""


class Transaction:
    """Operations in one or several parts, which the communication thread runs one after another.

    prepare: called in that thread before the first part, and again before all parts are repeated.
    """

    def __init__(
        self, recovery: Recovery | None, *, admits: bool = False, prepare: Callable[[], object] = lambda: None
    ) -> None:
        self._recovery, self._admits, self._prepare = recovery, admits, prepare
        self._parts: list[Callable[[], Any]] = []

    def run(self, part: Callable[[], T], *, last: bool = False) -> T:
        """Return the result of the next part. Only later parts may use the results of earlier ones."""
        if self._recovery is None:
            return part()
        begins, again = not self._parts, False
        self._parts.append(part)
        while True:
            try:
                if begins or again:
                    self._recovery.enter(admits=self._admits)
                    self._prepare()
                for earlier in self._parts[:-1] if again else ():
                    earlier()
                result = part()
            except Regrouped:
                again = True
                continue
            if last:
                self._parts.clear()  # breaks a reference cycle for every exchange
                self._recovery.complete()
            return result


# -- how the survivors of a broken view continue -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """How the survivors of a view continue."""

    completed: int  # transactions that every survivor has completed afterwards
    donors: Mapping[int, int]  # donor of each survivor that is one behind; empty if all repeat the transaction

    @property
    def again(self) -> bool:
        """Whether no survivor completed the transaction that broke, so that every participant repeats it."""
        return not self.donors


def resolve(completed: Mapping[int, int]) -> Resolution:
    """Assign a donor to each survivor that is one transaction behind. Every survivor computes the same result.

    Survivors that are behind are assigned round-robin to those that are ahead, both in ascending order.

    Args:
        completed: Number of completed transactions of each survivor, without newcomers.

    Raises:
        MismatchError: The counts differ by more than one.
        ValueError: `completed` is empty.
    """
    if not completed:
        raise ValueError("there are no survivors to continue from: pass the survivors' counts")
    least, most = min(completed.values()), max(completed.values())
    if most - least > 1:
        behind, ahead = (sorted(each for each, count in completed.items() if count == end) for end in (least, most))
        raise MismatchError(
            f"after the change of members, {_named(behind)} completed {least} exchanges and {_named(ahead)} {most}. "
            "The counts may differ by at most one, so a count is wrong, and continuing would mix two states. Restart "
            "from the last checkpoint."
        )
    ahead = sorted(each for each, count in completed.items() if count > least)
    behind = sorted(each for each, count in completed.items() if count == least) if ahead else []
    return Resolution(completed=most, donors={each: ahead[turn % len(ahead)] for turn, each in enumerate(behind)})


def _named(members: list[int]) -> str:
    return f"member{'s' if len(members) > 1 else ''} {', '.join(map(str, members))}"
