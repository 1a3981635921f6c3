"""Exceptions by Horovod's names."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective call failed: ranks made different calls, or a rank was lost. `elastic.run` restores and repeats."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of workers changed. `elastic.run` runs its function again.

    Args:
        skip_sync: True where the state is the same on every rank already.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of workers changed")
        self.skip_sync = skip_sync
