"""Network namespaces as hosts, the commands `ip` and `tc` in them, and the bytes that the kernel counted there.

The names of namespaces contain the process that owns them, so that stale ones can be removed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gossamer.errors import GossamerError, require


def call(command: Sequence[str], text: str = "") -> str:
    """Run a command and return what it printed. Raises EmulationError with its own words."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise EmulationError(f"there is no {command[0]} command here. Install iproute2 and util-linux.") from None
    if done.returncode:
        raise EmulationError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def ip(namespace: str, lines: Iterable[str]) -> None:
    """Several `ip` commands in one namespace, without their first word."""
    call(("ip", "-n", namespace, "-batch", "-"), "".join(f"{line}\n" for line in lines))


def tc(namespace: str, lines: Iterable[str]) -> None:
    call(("tc", "-n", namespace, "-batch", "-"), "".join(f"{line}\n" for line in lines))


class EmulationError(GossamerError):
    """This machine cannot emulate the network, or not in this way."""


COUNTERS = Path("/proc/self/net/dev")
SENT_BYTES, SENT_PACKETS = 8, 9  # after eight columns of what was received


def sent_bytes(header_bytes: int) -> int:
    """IP bytes that this process's host has sent so far; header_bytes: what the counter has on top of each packet."""
    line = next(line for line in COUNTERS.read_text().splitlines() if line.strip().startswith(f"{INTERFACE}:"))
    columns = [int(column) for column in line.partition(":")[2].split()]
    return columns[SENT_BYTES] - header_bytes * columns[SENT_PACKETS]


# -- hosts -------------------------------------------------------------------------------------------------------------

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
