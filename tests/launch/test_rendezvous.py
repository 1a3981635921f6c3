from __future__ import annotations

import socket

import pytest

from gossamer.errors import ConnectError
from gossamer.launch.rendezvous import check_free, free_endpoint, split_endpoint


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
