"""Endpoints that are closed after the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.rpc_endpoints import Open, endpoint

from gossamer.base.peer_ops import Peer
from gossamer.comm.rpc.endpoint import TcpEndpoint


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens endpoints that are closed after the test."""
    endpoints: list[TcpEndpoint] = []

    def open_(me: Peer, **other: Any) -> TcpEndpoint:
        endpoints.append(endpoint(me, **other))
        return endpoints[-1]

    yield open_
    for each in endpoints:
        each.close()
