"""Somebody between two ends who holds no token: reads frames, and changes tensors with all that needs no key."""

from __future__ import annotations

import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from support.proxy import Proxy

from gossamer.base.host_port import Address
from gossamer.comm import handshake
from gossamer.comm.rpc_protocol.frame_mac import TAG_BYTES
from gossamer.comm.rpc_protocol.frames import HEADER_BYTES, Kind

Forge = Callable[[bytes], bytes]  # the bytes of a push's tensors: what arrives instead


class ForgingProxy(Proxy):
    """Carries frames to `target`; what `forge` makes of pushed tensors gets a checksum that is right."""

    def __init__(self, target: Address, forge: Forge) -> None:
        self.forge, self.forged = forge, 0
        super().__init__(target)

    def _carry(self, source: socket.socket, sink: socket.socket, passes: threading.Event, left: int) -> None:
        if sink.getpeername()[:2] != self.target:
            super()._carry(source, sink, passes, left)
            return
        with suppress(OSError):
            hello = _exactly(source, handshake.HEADER_BYTES)
            sink.sendall(hello + _exactly(source, int.from_bytes(hello[8:12], "little")))
            while frame := self._frame(source):
                sink.sendall(frame)
        source.close()
        sink.close()

    def _frame(self, source: socket.socket) -> bytes:
        header = _exactly(source, HEADER_BYTES)
        control_bytes, payload_bytes = int.from_bytes(header[24:28], "little"), int.from_bytes(header[32:40], "little")
        control = _exactly(source, control_bytes + TAG_BYTES)
        if not payload_bytes:
            return header + control
        payload = _exactly(source, payload_bytes)
        checksum, tag = _exactly(source, 4), _exactly(source, TAG_BYTES)
        if header[5] == Kind.PUSH and (forged := self.forge(payload)) != payload:
            self.forged += 1
            payload, checksum = forged, zlib.crc32(forged).to_bytes(4, "little")
        return header + control + payload + checksum + tag


def _exactly(source: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        if not (more := source.recv(nbytes - len(data))):
            raise OSError("closed")
        data += more
    return data


@contextmanager
def forging(target: Address, forge: Forge) -> Iterator[ForgingProxy]:
    proxy = ForgingProxy(target, forge)
    try:
        yield proxy
    finally:
        proxy.close()
