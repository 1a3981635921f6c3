"""Non-blocking sockets, plain or TLS: listening, dialing, keep-alive, and errors that name the port or host."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

from gossamer.base import system
from gossamer.base.host_port import Address, family_of, is_loopback
from gossamer.comm.bandwidth.shared_buckets import DOWN, UP, Meter
from gossamer.errors import ConnectError

LOOPBACK_BUFFER_BYTES = 2**20  # fits a CPU cache; on networks the kernel tunes its own
BACKLOG = 512
SMALL_BUFFER_BYTES = 2**14  # a read that does not fill a buffer of this size has drained the socket
_BUFFERS_PER_CALL = 64
TLS_RECORD_CONTENT_BYTES, TLS_RECORD_BYTES = 2**14, 22  # of TLS 1.3: largest content; header, type and tag


class ResolvedAddress(NamedTuple):
    """An address to dial."""

    name: str  # as the user gave it, for certificates
    address: Address


class Channel(Protocol):
    """A connected non-blocking socket. Raises BlockingIOError if it is not ready, and OSError if it is broken."""

    def send(self, buffers: Sequence[memoryview]) -> int:
        """Send the beginning of `buffers`, and return the number of bytes sent."""

    def receive(self, buffer: memoryview) -> int:
        """Fill the beginning of `buffer`, and return the number of bytes; 0 if the peer has closed."""

    def is_drained(self, nbytes: int, buffer: memoryview) -> bool:
        """Whether the socket is empty after `nbytes` were received into `buffer`. The selector reports later data."""

    def needs_read_first(self) -> bool:
        """Whether TLS must receive before it can send."""

    def has_buffered_bytes(self) -> bool:
        """Whether received data is buffered that the selector does not report."""


class PlainChannel:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, buffers: Sequence[memoryview]) -> int:
        return system.send_some(self._sock, buffers[:_BUFFERS_PER_CALL])

    def receive(self, buffer: memoryview) -> int:
        return self._sock.recv_into(buffer)

    def is_drained(self, nbytes: int, buffer: memoryview) -> bool:
        # Within a long message, another read is useful although it may fail: it lets the kernel announce its window.
        return nbytes < buffer.nbytes <= SMALL_BUFFER_BYTES

    def needs_read_first(self) -> bool:
        return False

    def has_buffered_bytes(self) -> bool:
        return False


class TlsChannel:
    """A TLS connection. Its handshake is part of the first sends and receives."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._waits = False

    def send(self, buffers: Sequence[memoryview]) -> int:
        try:
            return self._sock.send(buffers[0])
        except ssl.SSLWantReadError:
            self._waits = True
            raise BlockingIOError from None
        except ssl.SSLWantWriteError:
            raise BlockingIOError from None
        except ssl.SSLCertVerificationError as fault:
            raise _unverified(fault) from None

    def receive(self, buffer: memoryview) -> int:
        self._waits = False
        try:
            return self._sock.recv_into(buffer)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLEOFError:
            return 0
        except ssl.SSLCertVerificationError as fault:
            raise _unverified(fault) from None

    def is_drained(self, nbytes: int, buffer: memoryview) -> bool:
        return False  # a read returns one record, and the next may be buffered

    def needs_read_first(self) -> bool:
        return self._waits

    def has_buffered_bytes(self) -> bool:
        return self._sock.pending() > 0


class LimitedChannel:
    """A channel to another machine, within the bandwidth limits of this one. It is not ready while it must wait."""

    def __init__(self, channel: Channel, meter: Meter) -> None:
        self._channel, self.meter = channel, meter
        self.needs_read_first, self.has_buffered_bytes = channel.needs_read_first, channel.has_buffered_bytes
        self._unsent_bytes = 0  # of the last attempt: OpenSSL expects no fewer in the next one
        self._overhead_bytes = TLS_RECORD_BYTES if isinstance(channel, TlsChannel) else 0

    def send(self, buffers: Sequence[memoryview]) -> int:
        beginning = _beginning(buffers, max(self._room(UP), self._unsent_bytes))
        self._unsent_bytes = beginning[0].nbytes
        nbytes = self._channel.send(beginning)
        self._unsent_bytes = 0
        self._count(UP, nbytes)
        return nbytes

    def receive(self, buffer: memoryview) -> int:
        nbytes = self._channel.receive(buffer[: self._room(DOWN)])
        self._count(DOWN, nbytes)
        return nbytes

    def is_drained(self, nbytes: int, buffer: memoryview) -> bool:
        return self._channel.is_drained(nbytes, buffer)

    def _room(self, way: int) -> int:
        if way == DOWN and self.has_buffered_bytes():
            return TLS_RECORD_CONTENT_BYTES  # received before, and not reported by the selector
        room = self.meter.room(way)
        if not room:
            raise BlockingIOError
        return room

    def _count(self, way: int, nbytes: int) -> None:
        records = -(-nbytes // TLS_RECORD_CONTENT_BYTES)
        self.meter.transferred(way, nbytes + records * self._overhead_bytes)


def _beginning(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """The first `nbytes` of buffers."""
    first = []
    for buffer in buffers:
        if nbytes <= 0:
            break
        first.append(buffer[:nbytes])
        nbytes -= buffer.nbytes
    return first


def _unverified(fault: ssl.SSLCertVerificationError) -> ConnectError:
    return ConnectError(
        f"The peer's certificate cannot be verified: {fault.verify_message}. Load the authority that "
        "signed it into the dialing context, and make it out for the address that is dialed."
    )


def listen(address: str, port: int) -> socket.socket:
    """Open a non-blocking listening socket; port 0 for any free port. Raises ConnectError."""
    listener = socket.socket(family_of(address), socket.SOCK_STREAM)
    try:
        system.reuse_address(listener)
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
            f"Port {port} of {address} is in use by another job, or by one that has not ended. "
            "Write port=0 for any free port, or another number."
        )
    return f"Cannot listen at {address}, port {port}: {fault.strerror}. Use an address of this machine."


def resolve_address(address: Address) -> ResolvedAddress:
    """Resolve a name, which may block; IPv4 takes precedence over IPv6, as in `listen`. Raises ConnectError."""
    name, port = address
    try:
        found = [
            (family, str(resolved[0]))
            for family, *_, resolved in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        ]
    except OSError as fault:
        raise ConnectError(
            f"The host name {name!r} cannot be resolved: {fault.strerror}. Use its IP address instead."
        ) from None
    _, host = min(found, key=lambda each: each[0] != socket.AF_INET)
    return ResolvedAddress(name, (host, port))


def dial(address: Address, source: Address | None = None) -> socket.socket:
    """Begin to connect a socket. It becomes writable when the connection succeeds or fails; see `check_connected`.

    source: own address, used if it is possible.
    """
    if source is not None:
        with suppress(OSError):  # this machine's address has changed, or an earlier connection has not ended yet
            return _dial(address, source)
    return _dial(address, None)


def _dial(address: Address, source: Address | None) -> socket.socket:
    sock = socket.socket(family_of(address[0]), socket.SOCK_STREAM)
    sock.setblocking(False)
    if source is not None:
        try:
            system.share_port(sock)
            sock.bind(source)
        except OSError:
            sock.close()
            raise
    fault = sock.connect_ex(address)
    if fault not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):  # the last on Windows
        sock.close()
        raise OSError(fault, os.strerror(fault))
    return sock


def check_connected(sock: socket.socket) -> None:
    """Raise the error if a dialed socket failed to connect."""
    fault = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if fault:
        raise OSError(fault, os.strerror(fault))


def tune(sock: socket.socket, dead_after_seconds: float) -> None:
    """Disable Nagle's algorithm; enable keep-alive and TCP_USER_TIMEOUT, which detect dead idle connections."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if is_loopback(sock.getpeername()[0]):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOOPBACK_BUFFER_BYTES)
    seconds = max(1, round(dead_after_seconds / 3))
    for name, value in {
        "TCP_KEEPIDLE": seconds,
        "TCP_KEEPINTVL": seconds,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": round(1000 * dead_after_seconds),
    }.items():  # not all systems support all of them
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
