"""Endpoints with somebody between them who changes what travels: nothing that was changed is taken."""

from __future__ import annotations

import struct

import pytest
import torch
from support.on_path import forging
from support.rpc_endpoints import HERE, THERE, Open, counting, push

from gossamer.base.peer_ops import Arrived, PeerEvent
from gossamer.errors import PeerLost


def thousands(payload: bytes) -> bytes:
    return struct.pack("<f", 1000.0) * (len(payload) // 4)


def test_a_push_that_is_changed_on_its_way_is_not_taken(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    server, worker = opened(THERE), opened(HERE)
    heard: list[PeerEvent] = []
    server.start(counting(heard))
    with forging(server.address, thousands) as between:
        worker.meet({THERE: between.address})
        with pytest.raises(PeerLost, match="did not answer"):
            worker.answer(push(0, torch.ones(10), within_seconds=0.5))
        assert between.forged >= 1
        assert not [event for event in heard if isinstance(event, Arrived)]
        between.forge = lambda payload: payload
        assert worker.answer(push(0, torch.ones(10))).payload[0].item() == 10.0
    assert "The connection to worker 1 is opened again. The payload of a frame does not match its tag" in (caplog.text)
