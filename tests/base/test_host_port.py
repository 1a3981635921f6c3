from __future__ import annotations

import pytest

from gossamer.base.host_port import is_loopback, read_host_port


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:29500", ("10.0.0.1", 29500)),
        ("node-1.local:1", ("node-1.local", 1)),
        ("[fe80::1]:65535", ("fe80::1", 65535)),
        ("fe80::1:80", ("fe80::1", 80)),
    ],
)
def test_an_address_is_read_with_the_host_without_brackets(text: str, address: tuple[str, int]) -> None:
    assert read_host_port(text) == address


@pytest.mark.parametrize(
    "text",
    ["", "host", "host:", ":1", "[]:1", "host:x", "host:0", "host:65536", "host:-1", "host:+1", "host: 1", "host:1_0"]
    + ["host:²", "host:\u0661", "host:" + "9" * 5000],  # digits to str.isdigit, str.isdecimal or int only
)
def test_other_texts_are_rejected_with_the_form_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        read_host_port(text)


def test_port_zero_is_any_free_one_only_where_that_is_allowed() -> None:
    assert read_host_port("host:0", least=0) == ("host", 0)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True), ("::1%lo", True)]
    + [("10.0.0.1", False), ("::", False), ("127.example", False), ("node-1", False), ("", False)],
)
def test_loopback_is_told_from_other_hosts_without_resolving_names(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
