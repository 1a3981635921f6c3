"""Addresses that no waiting makes right are told from names that may appear."""

from __future__ import annotations

import pytest

from gossamer.comm.environment.launcher_env import JobEnvironment
from gossamer.comm.environment.meeting_place import check_address
from gossamer.errors import ConnectError


def job(address: str | None) -> JobEnvironment:
    return JobEnvironment(rank=1, world=2, master_address=address, master_port=29500)


@pytest.mark.parametrize("address", ["10.0.0.1", "::1", "fe80::1%eth0", "localhost", "node-01.cluster.local.", "a_b"])
def test_addresses_and_names_are_taken(address: str) -> None:
    check_address(job(address))


@pytest.mark.parametrize("address", ["10.0.0.256", "10.0.0", "10.0.0.1:29500", "http://10.0.0.1", "a host", "", "a..b"])
def test_what_is_neither_is_refused_at_once(address: str) -> None:
    with pytest.raises(ConnectError, match=r"is neither an IP address nor a host name .* MASTER_ADDR=10\.0\.0\.1"):
        check_address(job(address))


def test_no_address_is_another_thing() -> None:
    with pytest.raises(ConnectError, match="rendezvous address is unknown"):
        check_address(job(None))
