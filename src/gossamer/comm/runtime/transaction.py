"""Transaction: the operations of one exchange, completed or repeated as a whole if the group changes in between.

A transaction ends with an operation that depends on every rank. The numbers of completed transactions therefore differ
by at most one, and a rank that has completed one can send the others every result that they miss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

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
