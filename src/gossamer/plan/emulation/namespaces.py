"""Network namespaces as hosts, the commands `ip` and `tc` in them, and byte counters of the kernel.

Names of namespaces contain the owning process, so that stale ones can be removed.
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
    """Run a command and return its output. Raises EmulationError with its error message."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise EmulationError(f"the command {command[0]} is missing. Install iproute2 and util-linux.") from None
    if done.returncode:
        raise EmulationError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def ip(namespace: str, lines: Iterable[str]) -> None:
    """Several `ip` commands in one namespace, without the word `ip`."""
    call(("ip", "-n", namespace, "-batch", "-"), "".join(f"{line}\n" for line in lines))


def tc(namespace: str, lines: Iterable[str]) -> None:
    call(("tc", "-n", namespace, "-batch", "-"), "".join(f"{line}\n" for line in lines))


class EmulationError(GossamerError):
    """This machine cannot emulate the network, or not in this way."""


COUNTERS = Path("/proc/self/net/dev")
SENT_BYTES, SENT_PACKETS = 8, 9  # after eight columns of received data


def sent_bytes(header_bytes: int) -> int:
    """IP bytes sent by this process's host so far; header_bytes: additional bytes per packet in the counter."""
    line = next(
        line for line in COUNTERS.read_text(encoding="utf-8").splitlines() if line.strip().startswith(f"{INTERFACE}:")
    )
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
        """Prefix of a command that runs it on this host, in the same process."""
        return ("nsenter", f"--net={DIRECTORY / self.namespace}", "--")


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def agree_on_tcp(host: EmulatedHost) -> None:
    """Use CUBIC, the congestion control of most machines, if the kernel has it.

    It is set by a route, since the namespace's own setting may be read-only.
    """
    with contextlib.suppress(EmulationError):
        to = f"10.77.0.0/24 dev {host.interface} scope link src {host.address}"
        ip(host.namespace, [f"route replace {to} congctl cubic"])


def new_tag() -> str:
    """Prefix of one testbed's names: its process, the process's start time, and the number of the testbed."""
    return f"gossamer-{os.getpid()}-{start_ticks(os.getpid()):x}-{next(_serials)}"


def emulated_hosts(tag: str, count: int) -> tuple[EmulatedHost, ...]:
    require(count <= MOST_HOSTS, f"an emulated network has at most {MOST_HOSTS} hosts, got {count}")
    return tuple(EmulatedHost(namespace=f"{tag}-{host}", address=address(host)) for host in range(count))


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot, which with its id identifies it; 0 if it does not exist."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # The program's name is second, in brackets, and may contain anything
    fields = status.rpartition(")")[2].split()
    state, start = fields[0], fields[19]
    return 0 if state in "ZX" else int(start)


def stale() -> Iterator[str]:
    """Namespaces with an ended owner."""
    names = sorted(path.name for path in DIRECTORY.iterdir()) if DIRECTORY.exists() else []
    for name in names:
        found = NAME.fullmatch(name)
        if found and start_ticks(int(found["pid"])) != int(found["start"], 16):
            yield name


def remove_stale() -> list[str]:
    """Remove the namespaces that ended processes left behind. Return their names."""
    return [name for name in stale() if _removed(name)]


def _removed(name: str) -> bool:
    try:
        call(("ip", "netns", "delete", name))
    except EmulationError:
        return False  # another starting testbed was faster
    return True
