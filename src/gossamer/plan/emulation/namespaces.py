"""Network namespaces as hosts: their names tell the process that owns them, so that stale ones can be removed."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gossamer.errors import require
from gossamer.plan.emulation.shell import EmulationError, call, ip

DIRECTORY = Path("/run/netns")
INTERFACE = "eth0"
NAME = re.compile(r"gossamer-(?P<pid>\d+)-(?P<start>[0-9a-f]+)-(?P<serial>\d+)-(?:\d+|bridge)")
MOST_HOSTS = 254  # the last byte of an address
_serials = itertools.count()


@dataclass(frozen=True, kw_only=True)
class EmulatedHost:
    """One host: a network namespace with `interface` at `address`."""

    namespace: str
    address: str
    interface: str = INTERFACE

    @property
    def prefix(self) -> tuple[str, ...]:
        """The beginning of a command that makes it run on this host, as the same process."""
        return ("nsenter", f"--net={DIRECTORY / self.namespace}", "--")


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def agree_on_tcp(host: EmulatedHost) -> None:
    """Use CUBIC, the congestion control of most machines, where the kernel has it.

    A route may name it where a namespace's own setting may not be changed.
    """
    with contextlib.suppress(EmulationError):
        to = f"10.77.0.0/24 dev {host.interface} scope link src {host.address}"
        ip(host.namespace, [f"route replace {to} congctl cubic"])


def new_tag() -> str:
    """A prefix of one testbed's names: its process, when that started, and which of its testbeds it is."""
    return f"gossamer-{os.getpid()}-{start_ticks(os.getpid()):x}-{next(_serials)}"


def emulated_hosts(tag: str, count: int) -> tuple[EmulatedHost, ...]:
    require(count <= MOST_HOSTS, f"a lab has at most {MOST_HOSTS} hosts, not {count}")
    return tuple(EmulatedHost(namespace=f"{tag}-{host}", address=address(host)) for host in range(count))


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot: with its number it names the process for good; 0 for none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # The program's own name comes second, in brackets, and may hold anything
    fields = status.rpartition(")")[2].split()
    state, start = fields[0], fields[19]
    return 0 if state in "ZX" else int(start)


def stale() -> Iterator[str]:
    """Namespaces whose owner is gone."""
    names = sorted(path.name for path in DIRECTORY.iterdir()) if DIRECTORY.exists() else []
    for name in names:
        found = NAME.fullmatch(name)
        if found and start_ticks(int(found["pid"])) != int(found["start"], 16):
            yield name


def remove_stale() -> list[str]:
    """Remove namespaces that ended processes left behind, and no others; returns the names."""
    return [name for name in stale() if _removed(name)]


def _removed(name: str) -> bool:
    try:
        call(("ip", "netns", "delete", name))
    except EmulationError:
        return False  # another testbed that starts now was faster
    return True
