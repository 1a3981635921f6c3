"""Roll call: gathers values from the surviving ranks, through a store that remains when a rank is lost.

Recipes that tolerate losses do not run in lock step, and a collective over all ranks fails with the first lost rank.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gossamer import events
from gossamer.base.units import first_line
from gossamer.comm.environment.rendezvous import comebacks, group_store
from gossamer.comm.environment.wait_progress import Missing, WaitProgress, named_ranks
from gossamer.comm.environment.wait_timeout import duration, timeout_seconds
from gossamer.comm.environment.worker_registry import has_exited, registry_store
from gossamer.comm.runtime.worker_scope import WorkerScope, current_worker
from gossamer.comm.tls_contexts import encrypts
from gossamer.errors import ConnectError, MismatchError, PeerLost

PIECE_BYTES = 2**22  # torch's store rejects values of more than 8 MiB
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.002, 0.05  # between two polls for the other ranks' values
FIRST_CHECK_SECONDS, CHECK_SECONDS = 0.25, 0.5  # between two checks of missing ranks, and why they are missing
SURE_SECONDS = 2.0  # a rank that the recipe's protocol has not reached for this long is not awaited
KEPT_CALLS, KEPT_LARGE_CALLS, LARGE_BYTES = 32, 2, 2**16  # values of this many calls are kept for late ranks


class RollEntry(NamedTuple):
    """Contribution of a rank to one call. pieces: number of parts in which its value is stored."""

    caller: str
    form: str  # names, dtypes and shapes of the value
    restart: int
    in_turn: bool  # False for a restarted rank, which may make fewer calls than the other ranks
    pieces: int

    @property
    def asked(self) -> tuple[str, str]:
        return self.caller, self.form


class StoredValue(NamedTuple):
    """Keys that this rank wrote to the store."""

    number: int
    keys: tuple[str, ...]
    nbytes: int


class RollCall:
    """Numbered all-gathers in which every rank receives the same values, from the ranks counted in the call.

    Each rank stores its value. The first rank that finds the values of all awaited ranks stores the list of these
    ranks; a later list is rejected. All ranks then read the values of the listed ranks, so a rank that is lost or late
    afterwards has no effect. A rank does not wait for

    - a rank that has ended this scope, or has exited for good;
    - a rank that the recipe's own protocol cannot reach (`silent`), after SURE_SECONDS.

    A late rank receives the agreed values, and stays in step with the other ranks. A restarted rank is counted only in
    calls with its own caller and form, because its loop may begin elsewhere. Until then it waits, and no other rank
    waits for it.

    Args:
        store: Shared by all ranks.
        scope: Name for these calls, equal on all ranks.
        rank: Rank of this worker.
        size: Initial number of workers of the run.
        restart: How many times this rank was restarted alone.
        replays: A restarted rank repeats all calls of its first start, and receives the same values.
        silent: Returns the ranks that the recipe's protocol cannot reach now. Called only while ranks are missing.
        exited: Whether the process of a rank has exited for good.
    """

    def __init__(
        self,
        store: Store,
        scope: str,
        rank: int,
        size: int,
        *,
        restart: int = 0,
        replays: bool = False,
        silent: Callable[[], Collection[int]] = tuple,
        exited: Callable[[int], bool] = lambda rank: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank, self.size = rank, size
        self._store = PrefixStore(f"calls/{scope}", store)
        self._restart, self._silent, self._exited, self._clock = restart, silent, exited, clock
        self._in_turn, self._replays = restart == 0, replays
        self._next: int | None = 0 if restart == 0 or replays else None
        self._silent_since: dict[int, float] = {}
        self._left_out: list[int] = []
        self._written: deque[StoredValue] = deque()

    def gather(self, caller: str, form: str, value: bytes) -> dict[int, bytes]:
        """Return the values of the counted ranks, by rank, ascending; equal on every rank.

        Args:
            caller: The function that the user called, such as gossamer.mean.
            form: Names, dtypes and shapes of the value.
            value: This rank's value.

        Raises:
            MismatchError: On every rank, if the ranks called different functions.
            PeerLost: A rank is alive but did not call within GOSSAMER_TIMEOUT.
            ConnectError: The store does not answer.
        """
        try:
            while (found := self._attempt(caller, form, value)) is None:
                pass
        except RuntimeError as problem:
            raise ConnectError(
                f"the store of this run did not answer {caller} ({first_line(problem)}). The launcher hosts "
                "it, or rank 0 if the workers were started by hand. Check the log of that process."
            ) from problem
        return found

    def end(self) -> None:
        """Announce that this rank makes no more calls in this scope. Idempotent."""
        with suppress(RuntimeError):  # the launcher has ended, and the other ranks end as well
            self._store.set(f"ended/{self.rank}", "1")

    def _attempt(self, caller: str, form: str, value: bytes) -> dict[int, bytes] | None:
        """Make one call. None if this rank's value was not considered; the caller then tries the next call."""
        if self._next is None:
            self._next = self._open_call()
        number, key = self._next, f"{self._next}/members"
        self._next += 1
        if not self._store.check([key]):
            self._write(number, RollEntry(caller, form, self._restart, self._in_turn, 0), value)
            if not self._wait(number, caller):
                self._resynchronize()
                return None
        members: list[int] = json.loads(self._store.get(key))["ranks"]
        entries = self._entries(number, members)
        if entries is None:
            self._resynchronize()
            return None
        expected = next((each for each in entries.values() if each.in_turn), next(iter(entries.values()))).asked
        counted = [rank for rank, each in entries.items() if each.in_turn or each.asked == expected]
        if not self._in_turn:
            local = self.rank in counted and entries[self.rank].restart == self._restart
            if not local and not (self._replays and (caller, form) == expected):
                return None
        values = {rank: self._value(number, rank, entries[rank]) for rank in counted}
        found = {rank: each for rank, each in values.items() if each is not None}
        if len(found) < len(values):
            self._resynchronize()
            return None
        _check_callers({rank: entries[rank].caller for rank in counted} | {self.rank: caller})
        self._notify(caller, counted)
        self._forget(number, counted)
        return found

    def _resynchronize(self) -> None:
        """Join the open call of the other ranks, which are far ahead: the values of this call are deleted."""
        self._next, self._in_turn = None, False

    def _open_call(self) -> int:
        return int(self._store.add("agreed", 0))

    # -- entries -------------------------------------------------------------------------------------------------------
    def _write(self, number: int, entry: RollEntry, value: bytes) -> None:
        """Store this rank's value, unless an earlier process of this rank has done so for this call."""
        parts = [value[begin : begin + PIECE_BYTES] for begin in range(0, len(value), PIECE_BYTES)]
        entry = entry._replace(pieces=len(parts))
        keys = [f"{number}/{self.rank}/{entry.restart}/{place}" for place in range(len(parts))]
        for key, part in zip(keys, parts, strict=True):
            self._store.set(key, part)  # type: ignore[arg-type]  # torch takes bytes, too
        own = f"{number}/{self.rank}"
        self._store.compare_set(own, "", json.dumps(entry))
        self._written.append(StoredValue(number, (own, *keys), len(value)))

    def _entries(self, number: int, members: Sequence[int]) -> dict[int, RollEntry] | None:
        """Return None if the entries are deleted."""
        keys = [f"{number}/{rank}" for rank in members]
        if not self._store.check(keys):
            return None
        return {rank: RollEntry(*json.loads(self._store.get(key))) for rank, key in zip(members, keys, strict=True)}

    def _value(self, number: int, rank: int, entry: RollEntry) -> bytes | None:
        keys = [f"{number}/{rank}/{entry.restart}/{place}" for place in range(entry.pieces)]
        if not all(self._store.check([key]) for key in keys):
            return None
        return b"".join(self._store.get(key) for key in keys)

    def _forget(self, number: int, counted: Sequence[int]) -> None:
        """Delete values so old that no late rank should need them."""

        def is_kept(each: StoredValue) -> bool:
            return number - each.number < (KEPT_CALLS if each.nbytes <= LARGE_BYTES else KEPT_LARGE_CALLS)

        for each in self._written:
            for key in () if is_kept(each) else each.keys:
                self._store.delete_key(key)
        self._written = deque(filter(is_kept, self._written))
        if self.rank == min(counted) and number >= KEPT_CALLS:
            self._store.delete_key(f"{number - KEPT_CALLS}/members")

    # -- agreement -----------------------------------------------------------------------------------------------------
    def _wait(self, number: int, caller: str) -> bool:
        """Wait for agreement on the members of this call; False if the agreement is so old that it was deleted."""
        agreed, everyone = f"{number}/members", [f"{number}/{rank}" for rank in range(self.size)]
        expected = [f"{number}/{rank}" for rank in range(self.size) if rank not in self._left_out]
        progress = WaitProgress(self.rank, f"{caller}", timeout_seconds(), clock=self._clock)
        pause, check_at, checked = FIRST_PAUSE_SECONDS, self._clock() + FIRST_CHECK_SECONDS, False
        while not self._store.check([agreed]):
            if self._store.check(everyone):
                self._propose(number, range(self.size))
            elif self._clock() >= check_at or (not checked and self._store.check(expected)):
                check_at, checked = self._clock() + CHECK_SECONDS, True
                if self._open_call() > number:
                    return bool(self._store.check([agreed]))
                self._check_missing(number, caller, progress)
            else:
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        progress.end()
        return True

    def _check_missing(self, number: int, caller: str, progress: WaitProgress) -> None:
        present = [rank for rank in range(self.size) if self._store.check([f"{number}/{rank}"])]
        missing = [rank for rank in range(self.size) if rank not in present]
        out = self._out(missing)
        awaited = [rank for rank in missing if rank not in out]
        if not awaited:
            self._propose(number, present)
        elif progress.over:
            raise PeerLost(
                f"rank {self.rank} waited {duration(progress.seconds)} in {caller} for {named_ranks(awaited)} "
                f"of {self.size}. These ranks are running, but did not call it. Call {caller} on every "
                "rank at the same place, not only if world.is_first."
            )
        else:
            why = "Every rank must call it, not only if world.is_first."
            missed = Missing(f"{named_ranks(awaited)} of {self.size}", why)
            progress.look(lambda: missed if self.rank == min(present) else None)

    def _out(self, missing: Sequence[int]) -> set[int]:
        """Return the missing ranks that are not awaited."""
        out = {rank for rank in missing if self._exited(rank) or self._store.check([f"ended/{rank}"])}
        unknown = [rank for rank in missing if rank not in out]
        silent, now = set(self._silent()) if unknown else set(), self._clock()
        self._silent_since = {rank: self._silent_since.get(rank, now) for rank in unknown if rank in silent}
        return out | {rank for rank, since in self._silent_since.items() if now - since >= SURE_SECONDS}

    def _propose(self, number: int, ranks: Sequence[int]) -> None:
        """Propose these ranks as the members of the call; an earlier proposal takes precedence."""
        members = json.dumps({"ranks": list(ranks), "by": [self.rank, self._restart]})
        if self._store.compare_set(f"{number}/members", "", members).decode() == members:
            self._store.add("agreed", 1)

    def _notify(self, caller: str, counted: Sequence[int]) -> None:
        left_out = [rank for rank in range(self.size) if rank not in counted]
        if left_out and left_out != self._left_out and self.rank in (min(counted), *left_out):
            events.notice(
                f"{caller} covers {named_ranks(counted)}, without {named_ranks(left_out)}: lost, ended, late, "
                "or restarted and at another call. This notice repeats when the missing ranks change"
            )
        self._left_out = left_out


def _check_callers(callers: Mapping[int, str]) -> None:
    first = min(callers)
    for rank, caller in callers.items():
        if caller != callers[first]:
            raise MismatchError(
                f"rank {first} called {callers[first]} while rank {rank} called {caller}. Make the "
                "same calls in the same order on every rank."
            )


# -- this process's roll calls, in the launcher's store or that of the process group -----------------------------------

_sessions: WeakKeyDictionary[WorkerScope, count[int]] = WeakKeyDictionary()  # numbers of sessions with a roll call
_outside: WeakKeyDictionary[WorkerScope, RollCall] = WeakKeyDictionary()


def session_calls(rank: int, size: int, silent: Callable[[], Collection[int]]) -> RollCall | None:
    """Return a new session's roll call, or None if no store is known. Every rank calls it once per session.

    silent: as in RollCall. Raises ConnectError if the launcher's store does not answer.
    """
    number = next(_sessions.setdefault(current_worker(), count()))
    registry = registry_store()
    if registry is not None:
        exited = partial(has_exited, registry)
        return RollCall(registry, f"{number}", rank, size, restart=comebacks(), silent=silent, exited=exited)
    store = None if encrypts() else group_store()  # this store is not encrypted, and other machines may reach it
    return None if store is None else RollCall(store, f"{number}", rank, size, silent=silent)


def process_calls(rank: int, size: int) -> RollCall | None:
    """Return the roll call for calls outside of sessions, or None if the launcher does not restart workers alone.

    Raises ConnectError if the launcher's store does not answer.
    """
    worker = current_worker()
    if worker not in _outside:
        registry = registry_store()
        if registry is None:
            return None
        events.emit(events.WithoutSession(trains=False))
        exited = partial(has_exited, registry)
        _outside[worker] = RollCall(registry, "outside", rank, size, restart=comebacks(), replays=True, exited=exited)
    return _outside[worker]
