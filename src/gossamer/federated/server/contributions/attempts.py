"""Attempts: counts tasks in a row that brought no contribution of a device, and explains why no version is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gossamer.events import notice

TRIES = 100  # tasks in a row without a contribution, after which none is expected of a device


class Attempts:
    """What became of tasks without a contribution, by device, since the device was last counted; and of rounds without
    a version. Gives notice of both.

    fewest: contributions that a version is made of at least.
    """

    def __init__(self, clients: int) -> None:
        """clients: of the whole federation."""
        self.fewest = 1
        self._clients = clients
        self._empty: Counter[int] = Counter()
        self._refused: Counter[int] = Counter()
        self._last_refusal = ""
        self._unable: set[int] = set()  # devices of which no contribution is expected any more
        self._given_up_in_a_row = 0  # rounds, since the last version

    def empty(self, client: int) -> None:
        """A device had nothing to train on."""
        self._empty[client] += 1
        self._review(client)

    def refused(self, client: int, why: str) -> None:
        """A contribution was refused. Notice as of rounds that were given up."""
        self._refused[client] += 1
        self._last_refusal = why
        if _is_noticed(self._refused[client]):
            notice(why)
        self._review(client)

    def counted(self, clients: Iterable[int]) -> None:
        """A version was made of these devices' contributions."""
        self._given_up_in_a_row = 0
        for client in clients:
            self._empty.pop(client, None)
            self._refused.pop(client, None)
            self._unable.discard(client)

    def given_up(self, index: int, why: str, reports: int) -> None:
        """A round was given up. Notice of the first, second, fourth ... in a row, so that a log stays short."""
        self._given_up_in_a_row += 1
        count = self._given_up_in_a_row
        if _is_noticed(count):
            row = f", {count} in a row" * (count > 1)
            text = f"round {index} is given up{row}, and another is begun: {why} ({reports} reports)"
            also = self.summary()
            notice(f"{text}. {also}" if also else text)

    def leave_too_few(self, lost: Iterable[int] = ()) -> bool:
        """Whether no version can be made. lost: devices that will not come back."""
        return self._clients - len(self._unable.union(lost)) < self.fewest

    def summary(self) -> str:
        """Why contributions did not come, in sentences; empty where there is nothing to say."""
        found = []
        if self._empty:
            found.append(
                f"{len(self._empty)} of {self._clients} devices had nothing to train on: the client function returned "
                "Update(samples=0), or its loader has no batch. Give these devices data."
            )
        if self._refused:
            found.append(
                f"{len(self._refused)} of {self._clients} devices were refused. The last: {self._last_refusal}."
            )
        return " ".join(found)

    def _review(self, client: int) -> None:
        could = not self.leave_too_few()
        if self._empty[client] + self._refused[client] >= TRIES:
            self._unable.add(client)
            if could and self.leave_too_few():
                notice(f"No version can be made any more. {self.summary()}")


def _is_noticed(count: int) -> bool:
    """Powers of two."""
    return count & (count - 1) == 0
