"""Sockets as peers need them: found out at once where a port is taken, closed soon where nobody is at the other end."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from gossamer.errors import ConnectError

Address = tuple[str, int]

LOOPBACK_BUFFER_BYTES = (
    2**20
)  # what fits a processor's cache is copied fastest; networks need what the kernel finds out
BACKLOG = 512
ASKED_ONCE_BYTES = 2**14  # who has room for so few is not asked in vain
_GATHERED = 64  # buffers in one system call


class Tls(NamedTuple):
    """What wraps connections: for those that this process dials, and for those that it accepts."""

    dialling: ssl.SSLContext
    accepting: ssl.SSLContext


class Place(NamedTuple):
    """Where to dial. name: as it was given, for certificates."""

    name: str
    address: Address


class Channel(Protocol):
    """A connected socket that never blocks. BlockingIOError: not now. OSError: never again."""

    def send(self, buffers: Sequence[memoryview]) -> int:
        """Hand over the beginning of `buffers`; returns how many bytes of them."""

    def receive(self, room: memoryview) -> int:
        """Fill the beginning of `room`; 0 means that the other end has closed."""

    def is_drained(self, nbytes: int, room: memoryview) -> bool:
        """Whether no more is there, having received `nbytes` into `room`; what comes later makes itself known."""

    def waits_to_read(self) -> bool:
        """Nothing can be sent before something was received."""

    def holds_bytes(self) -> bool:
        """There is more to receive that the kernel knows nothing of."""


class PlainChannel:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, buffers: Sequence[memoryview]) -> int:
        return self._connection.sendmsg(buffers[:_GATHERED])

    def receive(self, room: memoryview) -> int:
        return self._connection.recv_into(room)

    def is_drained(self, nbytes: int, room: memoryview) -> bool:
        # In the midst of a long message it is not: asking in vain lets the kernel tell the other end of its room.
        return nbytes < room.nbytes <= ASKED_ONCE_BYTES

    def waits_to_read(self) -> bool:
        return False

    def holds_bytes(self) -> bool:
        return False


class TlsChannel:
    """The same, encrypted. The handshake happens on the way, in whichever call finds it undone."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._connection = connection
        self._waits = False

    def send(self, buffers: Sequence[memoryview]) -> int:
        try:
            return self._connection.send(buffers[0])
        except ssl.SSLWantReadError:
            self._waits = True
            raise BlockingIOError from None
        except ssl.SSLWantWriteError:
            raise BlockingIOError from None
        except ssl.SSLCertVerificationError as fault:
            raise _unverified(fault) from None

    def receive(self, room: memoryview) -> int:
        self._waits = False
        try:
            return self._connection.recv_into(room)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLEOFError:
            return 0
        except ssl.SSLCertVerificationError as fault:
            raise _unverified(fault) from None

    def is_drained(self, nbytes: int, room: memoryview) -> bool:
        return False  # what came is one record, and the next may be there

    def waits_to_read(self) -> bool:
        return self._waits

    def holds_bytes(self) -> bool:
        return self._connection.pending() > 0


def _unverified(fault: ssl.SSLCertVerificationError) -> ConnectError:
    return ConnectError(
        f"The certificate of whoever answers is not to be trusted: {fault.verify_message}. Load the authority that "
        "signed it into the dialling context, and name the address that is dialled in it."
    )


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens, without blocking; port 0 takes any that is free."""
    listener = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError as fault:
        listener.close()
        raise ConnectError(_why_not(fault, address, port)) from None
    listener.setblocking(False)
    return listener


def _why_not(fault: OSError, address: str, port: int) -> str:
    if fault.errno == errno.EADDRINUSE:
        return (
            f"Port {port} of {address} is taken, by another job or by one that has not ended: nobody could connect. "
            "Write port=0 to take any that is free, or another number."
        )
    return f"Nothing can listen at {address}, port {port}: {fault.strerror}. Give an address of this machine."


def find(address: Address) -> Place:
    """Ask the resolver, which may take a while. Of several addresses IPv4's first: `listen` takes names alike."""
    name, port = address
    try:
        found = [
            (family, str(place[0])) for family, *_, place in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        ]
    except OSError as fault:
        raise ConnectError(
            f"Nobody knows a machine named {name!r}: {fault.strerror}. Give its address instead."
        ) from None
    _, host = min(found, key=lambda each: each[0] != socket.AF_INET)
    return Place(name, (host, port))


def dial(address: Address) -> socket.socket:
    """A socket that is being connected; it is writable once that is decided, see `check_connected`."""
    connection = socket.socket(_family(address[0]), socket.SOCK_STREAM)
    connection.setblocking(False)
    fault = connection.connect_ex(address)
    if fault not in (0, errno.EINPROGRESS):
        connection.close()
        raise OSError(fault, os.strerror(fault))
    return connection


def check_connected(connection: socket.socket) -> None:
    """Raise what kept a dialled socket from being connected."""
    fault = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if fault:
        raise OSError(fault, os.strerror(fault))


def tune(connection: socket.socket, dead_after_seconds: float) -> None:
    """Send at once; give up on what nobody acknowledges, also where nothing is being sent."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if is_loopback(connection.getpeername()[0]):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_BUFFER_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOOPBACK_BUFFER_BYTES)
    seconds = max(1, round(dead_after_seconds / 3))
    for name, value in {
        "TCP_KEEPIDLE": seconds,
        "TCP_KEEPINTVL": seconds,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": round(1000 * dead_after_seconds),
    }.items():  # not every system knows all of them
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
