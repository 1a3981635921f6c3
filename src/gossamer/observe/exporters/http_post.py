"""HTTP POST: sends a body to a server, in bounded time, and never reads the answer's content.

urllib's own timeout holds for a single read. A server that sends a byte now and then, or content without an end, would
keep the exporter's thread for ever, or fill the memory.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from typing import Any


def post(url: str, body: bytes, headers: Mapping[str, str], seconds: float) -> None:
    """Send `body` to `url`. Redirects are refused: urllib would make a GET without the body.

    Args:
        url: an http or https address.
        body: the request's content.
        headers: of the request.
        seconds: from the connection to the end of the answer's header, at most.

    Raises:
        OSError: the server cannot be reached, took too long, or answered with another status than 2xx.
    """
    asked = urllib.request.Request(url, body, dict(headers))
    opener = urllib.request.build_opener(_Http, _Https, _NoRedirect)
    with opener.open(asked, timeout=seconds):
        pass


@contextlib.contextmanager
def _cut_off(connection: HTTPConnection) -> Iterator[None]:
    """Shut the connection down once its timeout has passed since this call."""
    sock: socket.socket = connection.sock
    ended = threading.Event()

    def cut() -> None:
        ended.set()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(float(connection.timeout or 0), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if ended.is_set():
            raise TimeoutError("the server did not answer in time")


class _TimedConnection(HTTPConnection):
    def getresponse(self) -> HTTPResponse:
        with _cut_off(self):
            return super().getresponse()


class _TimedTlsConnection(HTTPSConnection):
    def getresponse(self) -> HTTPResponse:
        with _cut_off(self):
            return super().getresponse()


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_TimedConnection, req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_TimedTlsConnection, req, context=self._context)  # type: ignore[attr-defined]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None
