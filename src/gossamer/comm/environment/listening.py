"""Listening socket: listens only at the address by which the other workers reach this machine."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

ANYWHERE = ""
LOOPBACK, LOCALHOST = "127.0.0.1", "localhost"


def listen_as(host: str, port: int, *, several_machines: bool, interface_address: str | None) -> socket.socket:
    """Listen at one address of this machine.

    Args:
        host: Name or address of this machine. 127.0.0.1 and localhost are used as given, even with
            `several_machines`: all workers of such a trial are on one machine.
        port: 0 for any free port.
        several_machines: Skip a loopback address to which the host name resolves, because only this machine can reach
            it (Debian resolves a machine's own name to 127.0.1.1).
        interface_address: Address to use if no address of `host` is usable, for example behind a forwarded port; None
            for all addresses.

    Raises:
        OSError: With EADDRINUSE if the port is in use.
    """
    candidates = [LOOPBACK] if host == ANYWHERE and not several_machines else _addresses(host)
    for address in candidates:
        if several_machines and _is_loopback(address) and host not in (address, LOCALHOST):
            continue
        try:
            return _listen(address, port)
        except OSError as problem:
            if problem.errno != errno.EADDRNOTAVAIL:
                raise
    return _listen(interface_address or ANYWHERE, port)


def dialable(listener: socket.socket, host: str) -> str:
    """Return the address by which this machine reaches its own listener; `host` if that listens on all addresses."""
    address: str = listener.getsockname()[0]
    return host if ipaddress.ip_address(address.partition("%")[0]).is_unspecified else address


def names_this_machine(host: str) -> bool:
    """Whether `host` resolves to an address of this machine."""
    for address in _addresses(host):
        with contextlib.suppress(OSError):
            _listen(address, 0).close()
            return True
    return False


def _addresses(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _listen(address: str, port: int) -> socket.socket:
    if address != ANYWHERE:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server((ANYWHERE, port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((ANYWHERE, port))
