"""Addresses as HOST:PORT: one reader for options, variables, files and messages; which of them are of loopback."""

from __future__ import annotations

import ipaddress
import re
import socket

from gossamer.errors import require

Address = tuple[str, int]
LOOPBACK = "127.0.0.1"
_PORT = re.compile("[0-9]{1,5}")


def read_host_port(text: str, *, least: int = 1) -> Address:
    """Parse HOST:PORT, or [HOST]:PORT with an IPv6 address. `text` may come from another machine.

    Args:
        text: the address.
        least: smallest port; 0 where that is any free one.

    Returns:
        The host without brackets, and the port.

    Raises:
        ValueError: for any other text.

    >>> read_host_port("[::1]:29500")
    ('::1', 29500)
    """
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    require(
        bool(host) and _PORT.fullmatch(port) is not None and least <= int(port) < 2**16,
        f"{text[:80]!r} is not an address with a port: write HOST:PORT, such as 10.0.0.1:29500",
    )
    return host, int(port)


def family_of(host: str) -> socket.AddressFamily:
    """IPv6 for an address with colons, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`: an address of loopback, or "localhost". Names are not resolved."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
