"""Capabilities of this machine: whether it can emulate a network as it is, in a user namespace, or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path as File

from gossamer.comm.network import Network, Path
from gossamer.plan.emulation.tun_switch import PROGRAM

TUN = File("/dev/net/tun")
COMMANDS = ("ip", "tc", "nsenter", "unshare")
AS_ROOT = ("unshare", "--user", "--map-root-user", "--net", "--mount")
# Names of namespaces live under /run, which a user may not write: inside, it is another one. The network is another one
# too, because `ip netns` returns to where it began, and only an own network may be returned to.
ENTER = 'mount -t tmpfs tmpfs /run && ip link set lo up && exec "$@"'


@dataclass(frozen=True, kw_only=True)
class EmulationPlan:
    """How a network is emulated here."""

    emulation: str  # "kernel", "switch" or "paced"
    reenters: bool = False  # only inside a user namespace
    reason: str = ""  # why it is "paced"


def plan(network: Network) -> EmulationPlan:
    """How this machine can emulate `network`. Kernel where hosts' rates are all there is to it, else the switch."""
    emulation = "switch" if needs_switch(network) else "kernel"
    reason = _missing() or (_missing_for_switch() if emulation == "switch" else "")
    if not reason and _works("unshare", "--net"):
        return EmulationPlan(emulation=emulation)
    if not reason and _works(*AS_ROOT):
        return EmulationPlan(emulation=emulation, reenters=True)
    return EmulationPlan(
        emulation="paced",
        reason=reason or "making network namespaces is not allowed here, and neither are user namespaces (run as root)",
    )


def needs_switch(network: Network) -> bool:
    """Whether anything but the hosts' own rates is to be emulated."""
    return any(network.path(a, b) != Path() for a, b in combinations(range(len(network.hosts)), 2))


def reentering(command: Sequence[str]) -> list[str]:
    """The same command as the root of a user namespace of its own, in which everything vanishes with it."""
    return [*AS_ROOT, "--", "sh", "-c", ENTER, "sh", *command]


def _missing() -> str:
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    absent = [name for name in COMMANDS if shutil.which(name) is None]
    return f"there is no {', '.join(absent)} command here (install iproute2 and util-linux)" if absent else ""


def _missing_for_switch() -> str:
    if not PROGRAM.exists():
        return "gossamer-switch was not built (install a C++ compiler, then install Gossamer again)"
    if not os.access(TUN, os.R_OK | os.W_OK):
        return f"{TUN} is missing or may not be opened (modprobe tun; chmod 666 {TUN}), and delays need it"
    return ""


def _works(*command: str) -> bool:
    return subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
