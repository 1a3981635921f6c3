"""Registry of open sessions: those of this process that are not closed, so that a launcher can close them."""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import nn
from torch.optim import Optimizer


class OpenSession(Protocol):
    """What the registry's users ask of a session."""

    model: nn.Module
    optimizer: Optimizer

    @property
    def stopping(self) -> bool: ...
    def ask_to_stop(self) -> None: ...
    def close(self) -> None: ...


_open: weakref.WeakSet[OpenSession] = weakref.WeakSet()


def register(session: OpenSession) -> None:
    """Add a session; it leaves by `unregister`, or when it is garbage."""
    _open.add(session)


def unregister(session: OpenSession) -> bool:
    """Take a session out; False where it was not there, since it was closed before."""
    found = session in _open
    _open.discard(session)
    return found


def open_sessions() -> list[OpenSession]:
    """The sessions of this process that were not closed."""
    return list(_open)
