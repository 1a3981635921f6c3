"""Ping link: a TCP connection between two ranks; one requests pings and messages, and the other serves them."""

from __future__ import annotations

import socket
import struct
import time
from types import TracebackType

from gossamer.base.host_port import family_of
from gossamer.plan.doctor.link_statistics import Arrivals, Ping, bits_per_second

ORDER, NUMBER = struct.Struct("!cQ"), struct.Struct("!d")
PING, PUSH, FETCH, END = b"p", b"u", b"f", b"e"
BLOCK_BYTES = 1 << 20
RESOLUTION_SECONDS = 0.001  # between recorded arrivals
SILENCE_SECONDS = 10.0  # longest wait for a peer's answer
HELLO_SECONDS = 1.0


class PingLink:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SILENCE_SECONDS)
        self._connection = connection
        self._block = bytearray(BLOCK_BYTES)

    def __enter__(self) -> PingLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def ping(self) -> Ping:
        sent, began = time.time(), time.perf_counter()
        self._order(PING)
        answered = self._number()
        seconds, received = time.perf_counter() - began, time.time()
        return Ping(sent, answered, received, seconds)

    def push(self, nbytes: int) -> float:
        """Send this many bytes. Return bits per second, measured at the receiver."""
        self._order(PUSH, nbytes)
        self._send(nbytes)
        return self._number()

    def fetch(self, nbytes: int) -> float:
        """Request this many bytes. Return bits per second, measured here."""
        self._order(FETCH, nbytes)
        return bits_per_second(self._receive(nbytes))

    def end(self) -> None:
        self._order(END)

    def serve(self) -> None:
        """Serve the other end's requests until it ends."""
        while True:
            order, nbytes = ORDER.unpack(self._exactly(ORDER.size))
            if order == PING:
                self._connection.sendall(NUMBER.pack(time.time()))
            elif order == PUSH:
                self._connection.sendall(NUMBER.pack(bits_per_second(self._receive(nbytes))))
            elif order == FETCH:
                self._send(nbytes)
            else:
                return

    def _order(self, order: bytes, nbytes: int = 0) -> None:
        self._connection.sendall(ORDER.pack(order, nbytes))

    def _number(self) -> float:
        (number,) = NUMBER.unpack(self._exactly(NUMBER.size))
        return float(number)

    def _send(self, nbytes: int) -> None:
        block = memoryview(self._block)
        while nbytes:
            nbytes -= self._connection.send(block[:nbytes])

    def _receive(self, nbytes: int) -> Arrivals:
        """Receive into one block repeatedly, so that long messages need no more memory."""
        incoming, arrivals = 0, [(time.perf_counter(), 0)]
        while incoming < nbytes:
            incoming += self._some(memoryview(self._block)[: nbytes - incoming])
            now = time.perf_counter()
            if incoming == nbytes or now - arrivals[-1][0] >= RESOLUTION_SECONDS:
                arrivals.append((now, incoming))
        return arrivals

    def _exactly(self, nbytes: int) -> bytes:
        incoming = bytearray(nbytes)
        at = 0
        while at < nbytes:
            at += self._some(memoryview(incoming)[at:])
        return bytes(incoming)

    def _some(self, into: memoryview) -> int:
        count = self._connection.recv_into(into)
        if not count:
            raise ConnectionError("the other end closed the connection")
        return count


class PingListener:
    """Listening socket of a rank. Only callers with the job's `token` are accepted."""

    def __init__(self, address: str, token: bytes) -> None:
        self._token = token
        self._listener = socket.create_server((address, 0), family=family_of(address))

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def open(self, seconds: float) -> PingLink:
        """The link of the next caller. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._listener.settimeout(left)
            caller, _ = self._listener.accept()
            if self._knows(caller):
                return PingLink(caller)
            caller.close()
        raise TimeoutError("no caller with the job's token")

    def close(self) -> None:
        self._listener.close()

    def _knows(self, caller: socket.socket) -> bool:
        caller.settimeout(HELLO_SECONDS)
        try:
            return caller.recv(len(self._token), socket.MSG_WAITALL) == self._token
        except OSError:
            return False


def call(address: str, port: int, token: bytes, seconds: float) -> PingLink:
    """A link to the listener at this address. Raises OSError if it cannot be reached within `seconds`."""
    connection = socket.create_connection((address, port), seconds)
    try:
        connection.sendall(token)
    except OSError:
        connection.close()
        raise
    return PingLink(connection)
