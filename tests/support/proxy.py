"""Something between two ends that cuts connections, or holds back what is said, when a test wants it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from gossamer.base.host_port import Address


class Proxy:
    """Carries bytes to `target`. cuts: after how many bytes from the caller each next connection is cut.

    What is held back is neither carried nor read, and no connection is closed. heard: all bytes that were carried.
    """

    def __init__(self, target: Address, cuts: Iterable[int] = ()) -> None:
        self.target, self.connections, self.heard = target, 0, bytearray()
        self._cuts = iter(cuts)
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._passes = _set()
        self._held: list[threading.Event] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listening.getsockname()[:2]
        self._start(self._accept)

    def hold(self) -> None:
        """Carry nothing more through what is open; what is dialed from now on passes."""
        self._held.append(self._passes)
        self._passes.clear()
        self._passes = _set()

    def hold_all(self) -> None:
        """Nor through what is dialed, until `heal`."""
        self._passes.clear()

    def heal(self) -> None:
        self._passes.set()

    def close(self) -> None:
        for passes in (self._passes, *self._held):
            passes.set()
        accepting, *_ = self._threads
        _end(self._listening)
        accepting.join()  # nothing is opened after that, which would stay open
        for each in self._open:
            _end(each)
        for thread in self._threads:
            thread.join()

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listening.accept()
                self.connections += 1
                self._open.append(caller)
                called = socket.socket()
                self._open.append(called)
                if called.connect_ex(self.target):
                    caller.close()
                    continue
                passes = self._passes
                self._start(self._carry, caller, called, passes, next(self._cuts, 2**62))
                self._start(self._carry, called, caller, passes, 2**62)

    def _carry(self, source: socket.socket, sink: socket.socket, passes: threading.Event, left: int) -> None:
        with suppress(OSError):
            while passes.wait() and (data := source.recv(min(2**16, left))):
                passes.wait()
                self.heard += data
                sink.sendall(data)
                left -= len(data)
                if not left:
                    break
        for each in (source, sink):
            _end(each)


def _end(each: socket.socket) -> None:
    """Also for whoever waits for it."""
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@contextmanager
def between(target: Address, cuts: Iterable[int] = ()) -> Iterator[Proxy]:
    proxy = Proxy(target, cuts)
    try:
        yield proxy
    finally:
        proxy.close()
