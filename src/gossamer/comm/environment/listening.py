"""Listening socket: listens only at the address by which the other workers reach this machine, and dials theirs."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import selectors
import socket
import time
from collections.abc import Iterator, Mapping
from itertools import islice

from gossamer.base.host_port import LOOPBACK, Address, family_of, is_loopback

ANYWHERE = ""
LOCALHOST = "localhost"


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
        if several_machines and is_loopback(address) and host not in (address, LOCALHOST):
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


def _listen(address: str, port: int) -> socket.socket:
    if address != ANYWHERE:
        return socket.create_server((address, port), family=family_of(address))
    if socket.has_dualstack_ipv6():
        return socket.create_server((ANYWHERE, port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((ANYWHERE, port))


# -- which other workers can be dialed ---------------------------------------------------------------------------------

DIAL_SECONDS = 10.0  # enough to retransmit a lost first packet three times
MOST_AT_ONCE = 256  # concurrent connection attempts, each of which uses a descriptor


@contextlib.contextmanager
def listening(address: str | None, callers: int) -> Iterator[int]:
    """Yield a port on which `callers` processes can dial this one; 0 if its address is unknown."""
    with socket.socket() as listener:
        if address is not None:
            listener.bind((address, 0))
            listener.listen(callers)  # the kernel completes the handshake without accept
        yield listener.getsockname()[1] if address else 0


def unreachable(places: Mapping[int, Address], seconds: float = DIAL_SECONDS) -> dict[int, str]:
    """Dial all places, and return the errors by rank of those that do not answer within `seconds`."""
    problems: dict[int, str] = {}
    waiting = iter(places.items())
    while some := dict(islice(waiting, MOST_AT_ONCE)):
        problems |= _dial_all(some, seconds)
    return problems


def _dial_all(places: Mapping[int, Address], seconds: float) -> dict[int, str]:
    outcomes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as links, selectors.DefaultSelector() as selector:
        for rank, place in places.items():
            link = links.enter_context(socket.socket())
            link.setblocking(False)
            if (outcome := link.connect_ex(place)) in (errno.EINPROGRESS, errno.EWOULDBLOCK):  # the last on Windows
                selector.register(link, selectors.EVENT_WRITE, rank)
            else:
                outcomes[rank] = outcome
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                outcomes[key.data] = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)  # type: ignore[union-attr]
                selector.unregister(key.fileobj)
    found = {rank: outcomes.get(rank, errno.ETIMEDOUT) for rank in places}
    return {rank: os.strerror(outcome) for rank, outcome in found.items() if outcome}
