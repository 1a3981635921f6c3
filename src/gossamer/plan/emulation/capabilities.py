"""Capabilities of this machine: whether it can emulate a network directly, in a user namespace, or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path as File

from gossamer.base import system
from gossamer.comm.network import Network, Path
from gossamer.plan.emulation.tun_switch import PROGRAM

NO_RELAYS = "it has relays, and only elastic runs relay: --workers MIN:MAX --relay"
TUN = File("/dev/net/tun")
COMMANDS = ("ip", "tc", "nsenter", "unshare")
AS_ROOT = ("unshare", "--user", "--map-root-user", "--net", "--mount")
# Names of namespaces are under /run, which a user cannot write: inside, it is a separate one. The network is separate,
# too, because `ip netns` returns to the initial one, which only its owner may enter.
ENTER = 'mount -t tmpfs tmpfs /run && ip link set lo up && exec "$@"'


@dataclass(frozen=True, kw_only=True)
class EmulationPlan:
    """How a network is emulated on this machine."""

    emulation: str  # "kernel", "switch" or "paced"
    reenters: bool = False  # whether it needs a user namespace
    reason: str = ""  # why it is "paced"


def plan(network: Network, *, relays: bool = False) -> EmulationPlan:
    """How this machine can emulate `network`: by the kernel if only hosts' rates are limited, else by the switch.

    relays: whether the run's own relay connects the pairs of hosts that a relay of the network connects.
    """
    emulation = "switch" if needs_switch(network) else "kernel"
    reason = _missing() or (_missing_for_switch() if emulation == "switch" else "")
    if network.relayed and not relays:
        reason = NO_RELAYS
    if not reason and _works("unshare", "--net"):
        return EmulationPlan(emulation=emulation)
    if not reason and _works(*AS_ROOT):
        return EmulationPlan(emulation=emulation, reenters=True)
    return EmulationPlan(
        emulation="paced",
        reason=reason or "neither network namespaces nor user namespaces are allowed here (run as root)",
    )


def needs_switch(network: Network) -> bool:
    """Whether anything except the hosts' own rates is emulated."""
    return any(network.path(a, b) != Path() for a, b in combinations(range(len(network.hosts)), 2))


def reentering(command: Sequence[str]) -> list[str]:
    """The command as root of a new user namespace, in which everything disappears with it."""
    return [*AS_ROOT, "--", "sh", "-c", ENTER, "sh", *command]


def _missing() -> str:
    if not system.IS_LINUX:
        return f"network namespaces need Linux{system.OTHERWISE}"
    absent = [name for name in COMMANDS if shutil.which(name) is None]
    return f"missing commands: {', '.join(absent)} (install iproute2 and util-linux)" if absent else ""


def _missing_for_switch() -> str:
    if not PROGRAM.exists():
        return "gossamer-switch was not built (install a C++ compiler, then install Gossamer again)"
    if not os.access(TUN, os.R_OK | os.W_OK):
        return f"{TUN} is missing or cannot be opened (modprobe tun; chmod 666 {TUN}); delays need it"
    return ""


def _works(*command: str) -> bool:
    return subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
