"""Monitored barrier: waits until all ranks have come to a place, and names meanwhile those that have not."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from gossamer.comm.environment.wait_progress import Missing, WaitProgress, named_ranks
from gossamer.comm.environment.wait_timeout import VARIABLE, duration
from gossamer.errors import ConnectError, PeerLost

BUSY = (
    "Such a rank still loads data or builds its model, has failed, or never calls it: look at its own output. Every "
    "rank must call it, not only where world.is_first; a rank that trains in an earlier session waits for this one."
)
POLL_SECONDS, LONGEST_POLL_SECONDS = 0.002, 0.1


class KeyStore(Protocol):
    """The store by which torch formed the group."""

    def set(self, key: str, value: str) -> None: ...

    def add(self, key: str, amount: int) -> int: ...

    def check(self, keys: list[str]) -> bool: ...


class ArrivalRoll:
    """Who has come to one barrier, as all ranks enter it into a store. name: the barrier's, the same on every rank."""

    def __init__(self, store: KeyStore, name: str, rank: int, world: int) -> None:
        self._store, self._name, self._rank, self._world = store, name, rank, world

    def enter(self) -> None:
        self._store.set(self._key(self._rank), "1")
        if self._store.add(self._key("entered"), 1) == self._world:
            self._store.set(self._key("all"), "1")

    @property
    def complete(self) -> bool:
        """Whether all have entered: one question to the store, however many they are."""
        return self._has_entered("all")

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self._world) if not self._has_entered(rank)]

    @property
    def is_first_here(self) -> bool:
        """Whether this is the lowest rank that has come, which speaks for all."""
        return not any(self._has_entered(rank) for rank in range(self._rank))

    def _has_entered(self, who: int | str) -> bool:
        return self._store.check([self._key(who)])

    def _key(self, who: int | str) -> str:
        return f"gossamer/{self._name}/{who}"


def monitored_barrier(
    roll: ArrivalRoll,
    progress: WaitProgress,
    gone: Callable[[], str] = lambda: "",
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when all ranks have entered the roll. gone: names a rank that has left, if one has.

    Waits outside of torch, whose collectives neither name who is missing nor hear Ctrl-C. Raises PeerLost at once where
    a rank has left, and ConnectError where ranks have not come in time.
    """

    def missing() -> Missing | None:
        return Missing(named_ranks(ranks), BUSY) if roll.is_first_here and (ranks := roll.missing) else None

    def check_gone() -> None:
        if who := gone():
            raise PeerLost(
                f"{who} left while rank {progress.rank} waited for all to come to {progress.place}, so the group is "
                "broken. Its own output says why: look there first."
            )

    def complete() -> bool:
        try:
            return roll.complete
        except RuntimeError:  # the store ends with the process that holds it
            check_gone()
            raise

    roll.enter()
    pause = POLL_SECONDS
    while not complete():
        check_gone()
        progress.look(missing)
        if progress.over and (ranks := roll.missing):
            raise ConnectError(
                f"{named_ranks(ranks)} did not come to {progress.place} within {duration(progress.seconds)}, and "
                f"without all ranks none can begin. {BUSY} Ranks that need longer are waited for with "
                f"{VARIABLE}=7200, in seconds, for all of them."
            )
        sleep(pause)
        pause = min(2 * pause, LONGEST_POLL_SECONDS)
    progress.end()
