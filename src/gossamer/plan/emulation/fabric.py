"""Fabric protocol: what carries packets between emulated hosts."""

from __future__ import annotations

from typing import Protocol

from gossamer.comm.network import Host


class Fabric(Protocol):
    """Carries packets between hosts until it is closed; paths and rates may be changed meanwhile."""

    header_bytes: int  # that the interface's counters have on top of IP, each packet

    def cut(self, a: int, b: int) -> None:
        """Lose everything between two hosts, silently, both ways."""

    def heal(self, a: int, b: int) -> None: ...

    def set_line(self, host: int, line: Host) -> None:
        """Give a host's line other rates."""

    def cpu_seconds(self) -> float | None:
        """Processor time that carrying took so far; None where the kernel does it in passing."""

    def close(self) -> None: ...
