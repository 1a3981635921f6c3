"""HTTP POST to servers that answer without an end, byte by byte, or elsewhere."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.error import HTTPError

import pytest

from gossamer.observe.exporters.http_post import post

Reply = Callable[[socket.socket, threading.Event], None]


@contextmanager
def answering(reply: Reply) -> Iterator[str]:
    """A server that reads one request and then runs `reply` until its client has gone."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as client, suppress(OSError):
                client.recv(2**16)
                reply(client, over)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/metrics"
        finally:
            over.set()
            thread.join()


def endless(client: socket.socket, over: threading.Event) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while not over.is_set():
        client.sendall(b"x" * 2**20)


def byte_by_byte(client: socket.socket, over: threading.Event) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\n")
    while not over.wait(0.01):
        client.sendall(b"x")


def elsewhere(client: socket.socket, over: threading.Event) -> None:
    client.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\n\r\n")
    while not over.is_set():
        client.sendall(b"x" * 2**20)


def test_an_answer_without_an_end_is_not_read() -> None:
    with answering(endless) as url:
        post(url, b"{}", {}, 30.0)


def test_a_header_that_comes_byte_by_byte_ends_with_a_timeout() -> None:
    with answering(byte_by_byte) as url, pytest.raises(OSError, match="did not answer in time"):
        post(url, b"{}", {}, 0.2)


def test_a_redirect_is_refused_and_its_content_not_read() -> None:
    with answering(elsewhere) as url:
        with pytest.raises(HTTPError, match="302") as caught:
            post(url, b"{}", {}, 30.0)
        caught.value.close()
