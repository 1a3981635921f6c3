"""Registry of open sessions: those of this worker that are not closed, so that a launcher can close them."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from gossamer.comm.runtime.worker_scope import WorkerScope, current_worker


class OpenSession(Protocol):
    """What the registry's users ask of a session."""

    @property
    def model(self) -> nn.Module | None:
        """None: a session of arrays."""

    @property
    def optimizer(self) -> Optimizer | None: ...
    @property
    def should_stop(self) -> bool: ...
    def request_stop(self) -> None: ...
    def close(self) -> None: ...
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool: ...


_open: weakref.WeakKeyDictionary[OpenSession, WorkerScope] = weakref.WeakKeyDictionary()


def register(session: OpenSession) -> None:
    """Add a session; it leaves by `unregister`, or when it is garbage."""
    _open[session] = current_worker()


def unregister(session: OpenSession) -> bool:
    """Take a session out; False where it was not there, since it was closed before."""
    return _open.pop(session, None) is not None


def open_sessions() -> list[OpenSession]:
    """The sessions of this worker that were not closed."""
    return [session for session, worker in list(_open.items()) if worker is current_worker()]
