"""Shell commands `ip` and `tc`; what they complain of becomes an EmulationError."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence

from gossamer.errors import GossamerError


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
