from __future__ import annotations

import socket

import pytest

from gossamer.errors import ConnectError
from gossamer.launch import rendezvous
from gossamer.launch.ports import free_endpoint
from gossamer.launch.rendezvous import check_free, reach, split_endpoint


def test_a_free_endpoint_can_be_listened_on() -> None:
    check_free(free_endpoint())


def test_a_port_in_use_is_named_with_the_next_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConnectError, match=f"Port {port} is in use.*--rendezvous 10.0.0.1:{port + 1}"):
            check_free(f"10.0.0.1:{port}")


@pytest.mark.parametrize("endpoint", ["", "host", "host:", ":29500", "host:http", "host:0", "host:65536"])
def test_a_place_without_host_or_port_is_refused(endpoint: str) -> None:
    with pytest.raises(ConnectError, match="HOST:PORT"):
        split_endpoint(endpoint)


def test_addresses_of_version_six_keep_their_colons() -> None:
    assert split_endpoint("[fe80::1]:29500") == ("fe80::1", 29500)


def test_an_address_of_another_machine_is_refused_on_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_dial", lambda host, port, seconds: TimeoutError("timed out"))
    with pytest.raises(ConnectError, match=r"does not lead to this machine \(timed out\).*--node-rank 0"):
        check_free(free_endpoint())


def test_who_comes_late_finds_the_first_machine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        reach(f"127.0.0.1:{first.getsockname()[1]}", seconds=5.0)


@pytest.mark.parametrize(
    ("problem", "cause"),
    [
        (ConnectionRefusedError("refused"), "nothing listens there"),
        (TimeoutError("timed out"), "Nobody answers"),
        (OSError("no route to host"), "Nobody answers"),
        (socket.gaierror("unknown"), "write the address instead"),
    ],
)
def test_in_vain_it_says_where_how_and_why(monkeypatch: pytest.MonkeyPatch, problem: OSError, cause: str) -> None:
    monkeypatch.setattr(rendezvous, "_dial", lambda host, port, seconds: problem)
    with pytest.raises(ConnectError, match=f"machine 0 at 127.0.0.1:9, interface .+: {problem}.*{cause}"):
        reach("127.0.0.1:9", seconds=0.0)


def test_a_first_machine_that_is_not_up_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([ConnectionRefusedError(), ConnectionRefusedError(), None])
    monkeypatch.setattr(rendezvous, "_dial", lambda host, port, seconds: next(answers))
    reach("127.0.0.1:9", seconds=5.0)
    assert next(answers, "all asked") == "all asked"
