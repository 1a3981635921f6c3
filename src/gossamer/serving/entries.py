"""What changes a shard, one entry each: enough to make the same changes again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gossamer.core.ops import Payload
from gossamer.core.peer_ops import Stamp

NOBODY = Stamp(worker=0, step=-1)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A command of Shard by its name, and what it was given."""

    what: str
    stamp: Stamp = NOBODY
    version: int = 0
    rate: float = 1.0
    about: str = ""
    payload: Payload = ()


class Journal(Protocol):
    """Where entries are written before anything changes and before anyone is told."""

    def write(self, entry: Entry) -> None:
        """Keep the entry. Raises nothing: who cannot write says so once."""

    def close(self) -> None:
        """Let go of files."""


class Forgetful:
    """A journal that keeps nothing."""

    def write(self, entry: Entry) -> None:
        pass

    def close(self) -> None:
        pass
