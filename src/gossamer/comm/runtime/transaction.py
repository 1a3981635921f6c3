"""Transaction: the operations of one exchange, finished or made again as a whole where the group changes in between.

A transaction ends with an operation that hears of every rank. So ranks differ by at most one in how many they have
completed, and a rank that has completed one can give the others every answer that they still miss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Regrouped(Exception):
    """The group is another one, and nobody has completed the transaction under way: it is made again from its start."""


class Recovery(Protocol):
    """A group that outlives its members. Its transactions follow each other, in the same order on every rank."""

    @property
    def members(self) -> tuple[int, ...]:
        """By rank, a number that no other member ever has."""

    @property
    def awaited(self) -> bool:
        """Whether newcomers waited to be let in when the transaction under way was entered: alike on every rank."""

    def enter(self, *, admits: bool) -> None:
        """A transaction begins, or begins again. admits: newcomers may be let in before it, where all ranks say so:
        the training thread will wait for it, with parameters and optimizer between two steps. Raises PeerLost."""

    def complete(self) -> None:
        """All of its operations were answered."""


class Transaction:
    """Operations in one or several parts, which the communication thread runs one after another.

    prepare: called there before the first part, and again whenever all parts so far are made again.
    """

    def __init__(
        self, recovery: Recovery | None, *, admits: bool = False, prepare: Callable[[], object] = lambda: None
    ) -> None:
        self._recovery, self._admits, self._prepare = recovery, admits, prepare
        self._parts: list[Callable[[], Any]] = []

    def run(self, part: Callable[[], T], *, last: bool = False) -> T:
        """The result of the next part. What earlier parts returned must not matter to anyone but later ones."""
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
                self._parts.clear()  # they know whose they are, and that knows this: a cycle for every exchange
                self._recovery.complete()
            return result
