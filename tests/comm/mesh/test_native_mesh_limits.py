"""Native mesh with bandwidth limits: results, counted bytes, and the cap."""

from __future__ import annotations

import time

import pytest
import torch
from support.limited_machines import limited
from support.mesh_group import Group, SealedGroup, whole_numbers

from gossamer.algorithms.collectives import DirectAllReduce, RingAllReduce
from gossamer.base.kernels.library import are_built
from gossamer.base.ops import AllReduceMean
from gossamer.comm.bandwidth.shared_buckets import DOWN, UP
from gossamer.comm.mesh.link_measurement import meet
from gossamer.comm.network.tcp_model import ETHERNET

pytestmark = pytest.mark.skipif(not are_built(), reason="the compiled loops are missing")
MBIT = 1e6


@pytest.mark.parametrize("kind", [Group, SealedGroup])
@pytest.mark.parametrize("collective", [DirectAllReduce(), RingAllReduce()], ids=repr)
def test_a_limited_mean_is_the_same_to_the_bit(tmp_path, kind, collective):
    given = whole_numbers(3, 200_000)
    with limited(tmp_path, up=400 * MBIT, down=400 * MBIT), kind(3, collective) as group:
        heard = group.answers([AllReduceMean(each) for each in given])
    assert all(torch.equal(each, sum(given) / 3) for each in heard)


def test_both_directions_count_payload_headers_and_acknowledgments(tmp_path):
    given = whole_numbers(2, 500_000)
    payload = 2 * given[0].nbytes  # a mean of two ranks moves one tensor in each direction
    with limited(tmp_path) as bandwidth, Group(2) as group:
        before = bandwidth.counted_way(UP), bandwidth.counted_way(DOWN)
        group.answers([AllReduceMean(each) for each in given])
        counted = bandwidth.counted_way(UP) - before[0], bandwidth.counted_way(DOWN) - before[1]
    assert min(counted) >= ETHERNET.wire_bytes(payload)
    assert max(counted) <= 1.25 * payload


def test_handshakes_before_the_mesh_count(tmp_path):
    with limited(tmp_path) as bandwidth, Group(2):
        assert bandwidth.counted_way(UP) > 100
        assert bandwidth.counted_way(DOWN) > 100


def test_an_operation_waits_at_the_cap_and_continues_with_a_higher_one(tmp_path):
    given = whole_numbers(2, 1_000_000)
    with limited(tmp_path, cap=2_000_000) as bandwidth, Group(2) as group:
        waits = group.all(lambda rank: group.transports[rank].begin(AllReduceMean(given[rank])))
        for mesh in group.meshes:
            mesh.make_progress()
        for _ in range(50):
            for mesh in group.meshes:
                mesh.make_progress()
        assert 2_000_000 <= bandwidth.counted < 4_000_000
        bandwidth.set_cap(None)
        heard = group.all(lambda rank: waits[rank]())
    assert all(torch.equal(each, sum(given) / 2) for each in heard)


@pytest.mark.parametrize("way", ["up", "down"])
def test_operations_in_flight_and_following_ones_wait_for_the_limit(tmp_path, way):
    """A header of the next operation may arrive before its rank begins it, and then be read after a delay."""
    with limited(tmp_path, **{way: 8 * MBIT}), Group(2) as group:
        for _ in range(3):
            seconds = group.all(lambda rank: meet(group.transports[rank], [(0, 1), (1, 0)], 2**14))
            assert seconds[0] == seconds[1]


def test_connections_within_a_machine_are_not_limited(tmp_path, monkeypatch):
    given = whole_numbers(2, 100_000)
    with limited(tmp_path, cap=0) as bandwidth:
        monkeypatch.undo()
        monkeypatch.setattr("gossamer.comm.bandwidth.shared_buckets.is_local", lambda sock: True)
        with Group(2) as group:
            heard = group.answers([AllReduceMean(each) for each in given])
        assert bandwidth.counted == 0
    assert all(torch.equal(each, sum(given) / 2) for each in heard)


@pytest.mark.measures
def test_the_rate_of_a_mean_is_near_the_limit(tmp_path):
    given = whole_numbers(2, 250_000)
    with limited(tmp_path, up=40 * MBIT) as bandwidth, Group(2) as group:
        group.answers([AllReduceMean(each) for each in given])
        counted, began = bandwidth.counted_way(UP), time.monotonic()
        group.answers([AllReduceMean(each) for each in given])
        rate = 8 * (bandwidth.counted_way(UP) - counted) / (time.monotonic() - began)
    assert 0.7 * 40 * MBIT <= rate <= 1.1 * 40 * MBIT
