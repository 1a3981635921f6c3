"""The page's server on a real port of this machine. Needs starlette and uvicorn."""

from __future__ import annotations

import http.client
import signal
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from support.watched_runs import KINDS, made

from gossamer.comm.runtime.signal_handlers import handling
from gossamer.errors import GossamerError
from gossamer.observe.watch import server as servers
from gossamer.observe.watch.server import PageServer, check_installed


def test_a_missing_part_is_named_with_the_line_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "find_spec", lambda name: None)
    with pytest.raises(GossamerError, match=r'starlette and uvicorn.*pip install "gossamer\[watch\]"'):
        check_installed()


def test_a_page_is_served_streams_and_ends(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    with PageServer([made(tmp_path, KINDS["live"])]).in_thread() as link:
        address = urlsplit(link)
        assert address.hostname == "127.0.0.1"
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
        for path, status in ((f"/?{address.query}", 200), ("/?token=wrong", 403)):
            connection.request("GET", path)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == status
        connection.request("GET", f"/events?{address.query}")
        stream = connection.getresponse()
        told = b"".join(stream.readline() for _ in range(5))
        assert b"event: tick" in told
        connection.close()
    with pytest.raises(OSError):  # noqa: PT011  refused, or reset
        socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=5)


def test_the_printed_link_works_if_the_page_listens_at_all_addresses(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    with PageServer([made(tmp_path, KINDS["live"])], host="0.0.0.0").in_thread() as link:
        address = urlsplit(link)
        connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=30)  # the name may not resolve here
        connection.request("GET", f"/?{address.query}", headers={"Host": address.netloc})
        assert connection.getresponse().status == 200
        connection.close()


def test_the_page_outlives_a_sigint_that_is_ignored_and_ends_by_sigterm(tmp_path: Path) -> None:
    """As `gossamer watch RUN &` does in a shell script."""
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    server, statuses, ended = PageServer([made(tmp_path, KINDS["live"])]), list[int](), list[int]()
    address, handlers = urlsplit(server.link), list[object]()

    def visit() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
            connection.request("GET", "/?token=wrong")
            statuses.append(connection.getresponse().status)
            connection.close()
            handlers.append(signal.getsignal(signal.SIGINT))
            signal.pthread_kill(threading.main_thread().ident or 0, number)

    visitor = threading.Thread(target=visit)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with handling(lambda number, frame: ended.append(number), signal.SIGTERM):
            visitor.start()
            server.serve()
            visitor.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert statuses == [403, 403]
    assert handlers == [signal.SIG_IGN] * 2
    assert ended == [signal.SIGTERM]


def test_a_port_that_is_taken_is_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(GossamerError, match="Leave out --port"):
        PageServer([made(tmp_path, KINDS["live"])], port=taken.getsockname()[1])


@pytest.mark.parametrize("host", ["203.0.113.7", "no such name"])
def test_an_address_of_another_machine_is_a_sentence(tmp_path: Path, host: str) -> None:
    pytest.importorskip("uvicorn")
    with pytest.raises(GossamerError, match="--host needs an address of this machine"):
        PageServer([made(tmp_path, KINDS["live"])], host=host)
