"""Registry of open sessions of this worker, so that a launcher can close them."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from gossamer.comm.runtime.worker_scope import WorkerScope, current_worker


class OpenSession(Protocol):
    """The interface of a session that the registry's users need."""

    @property
    def model(self) -> nn.Module | None:
        """The model; None for a session of arrays."""

    @property
    def optimizer(self) -> Optimizer | None: ...
    @property
    def steps(self) -> int: ...
    @property
    def should_stop(self) -> bool: ...
    def request_stop(self) -> None: ...
    def close(self) -> None: ...
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool: ...


_open: weakref.WeakKeyDictionary[OpenSession, WorkerScope] = weakref.WeakKeyDictionary()


def register(session: OpenSession) -> None:
    """Add a session, until `unregister` or its garbage collection."""
    _open[session] = current_worker()


def unregister(session: OpenSession) -> bool:
    """Remove a session; False if it was closed before."""
    return _open.pop(session, None) is not None


def open_sessions() -> list[OpenSession]:
    """Return the sessions of this worker that are not closed."""
    return [session for session, worker in list(_open.items()) if worker is current_worker()]


class LaterSessions:
    """The sessions of this worker that are opened after this object is made."""

    def __init__(self) -> None:
        self._earlier = weakref.WeakSet(open_sessions())

    @property
    def train(self) -> bool:
        """Whether one of them is open and has made a step."""
        return any(session.steps and session not in self._earlier for session in open_sessions())
