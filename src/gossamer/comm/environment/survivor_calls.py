"""Survivor calls: this process's roll calls, in the launcher's store or the process group's store."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from itertools import count
from weakref import WeakKeyDictionary

from gossamer import events
from gossamer.comm.environment.rendezvous import comebacks, group_store
from gossamer.comm.environment.roll_call import RollCall
from gossamer.comm.environment.worker_registry import has_exited, registry_store
from gossamer.comm.runtime.worker_scope import WorkerScope, current_worker
from gossamer.comm.tls_contexts import encrypts

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
