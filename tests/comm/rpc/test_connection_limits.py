"""Endpoints with bandwidth limits: all bytes arrive and are counted, and the cap stops them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.limited_machines import limited
from support.rpc_endpoints import HERE, THERE, TOKEN, counting, push

from gossamer.base.kernels.library import are_built
from gossamer.comm.bandwidth.shared_buckets import DOWN, UP
from gossamer.comm.network.tcp_model import ETHERNET
from gossamer.comm.rpc.endpoint import TcpEndpoint
from gossamer.comm.rpc.options import EndpointOptions
from gossamer.comm.rpc_protocol.credentials import Credentials

pytestmark = pytest.mark.skipif(not are_built(), reason="the compiled loops are missing")
LARGEST = 2**24


def endpoint(peer):
    return TcpEndpoint(
        Credentials(me=peer, token=TOKEN, run="run", largest_frame_bytes=LARGEST),
        EndpointOptions(dead_after_seconds=20.0),
    )


@pytest.mark.parametrize("rate", [None, 200e6])
def test_requests_and_answers_arrive_and_count_in_both_directions(tmp_path, rate):
    payload = torch.ones(500_000)
    with limited(tmp_path, up=rate, down=rate) as bandwidth, endpoint(HERE) as here, endpoint(THERE) as there:
        there.start(counting())
        here.meet({THERE: there.address})
        answers = [here.answer(push(step, payload)) for step in range(3)]
        counted = bandwidth.counted_way(UP), bandwidth.counted_way(DOWN)
    assert [float(answer.payload[0]) for answer in answers] == [500_000.0, 1_000_000.0, 1_500_000.0]
    assert min(counted) >= ETHERNET.wire_bytes(3 * payload.nbytes)
    assert max(counted) <= 1.3 * 3 * payload.nbytes


def test_a_request_waits_at_the_cap_and_continues_with_a_higher_one(tmp_path):
    payload = torch.ones(500_000)
    with limited(tmp_path, cap=1_000_000) as bandwidth, endpoint(HERE) as here, endpoint(THERE) as there:
        there.start(counting())
        here.meet({THERE: there.address})
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(here.answer, push(0, payload))
            while bandwidth.counted < 1_000_000:
                assert not asked.done()
            stopped_at = bandwidth.counted
            assert not asked.done()
            bandwidth.set_cap(None)
            assert float(asked.result(30).payload[0]) == 500_000.0
    assert stopped_at < 4_000_000
