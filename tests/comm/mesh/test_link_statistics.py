"""Link statistics: what the kernel counts is what was sent, and a connection that closes keeps its last numbers."""

from __future__ import annotations

import os
import socket
import struct
import time
from dataclasses import replace

import pytest
import torch
from support.mesh_group import MESSAGE, Group

from gossamer import events
from gossamer.base.ops import AllGather
from gossamer.comm.mesh.link_measurement import Links, RelayLine
from gossamer.comm.mesh.link_statistics import LinkStatistics, declared, parse_declarations, process_name, report_links
from gossamer.comm.mesh.tcp_info import link_counters
from gossamer.events import LinkCounters, LinksOpened

HEADER_BYTES = 16  # of a message


class Kernel:
    """A socket whose kernel says these numbers of struct tcp_info, and ones that nobody asked for everywhere else."""

    def __init__(self, *, limited: bool, round_trip: int, retransmits: int, acknowledged: int, rate: int) -> None:
        info = bytearray(b"\xff" * 232)
        info[7] = 0xFE | limited
        struct.pack_into("=I", info, 68, round_trip)
        struct.pack_into("=I", info, 100, retransmits)
        struct.pack_into("=Q", info, 120, acknowledged)
        struct.pack_into("=3Q", info, 160, rate, 2_000_000, 500_000)
        self.info = bytes(info)

    def getsockopt(self, level: int, option: int, nbytes: int) -> bytes:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
        return self.info[:nbytes]


@pytest.mark.parametrize("limited", [False, True])
def test_counters_are_read_where_the_kernel_has_them(limited: bool) -> None:
    kernel = Kernel(limited=limited, round_trip=20_500, retransmits=7, acknowledged=2**40 + 3, rate=2**33)
    assert link_counters(kernel) == LinkCounters(0.0205, 2**40 + 3, 7, 1.5, 2.0**33, limited)  # type: ignore[arg-type]


def test_a_kernel_of_a_shorter_struct_reports_nothing() -> None:
    kernel = Kernel(limited=False, round_trip=1, retransmits=1, acknowledged=1, rate=1)
    kernel.info = kernel.info[:104]  # Linux 2.6
    assert link_counters(kernel) is None  # type: ignore[arg-type]


def test_a_closed_connection_reports_nothing() -> None:
    with socket.socket() as closed:
        pass
    assert link_counters(closed) is None


def in_flight(connection: socket.socket) -> int:
    """Segments: tcpi_unacked."""
    return int(struct.unpack_from("=I", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28), 24)[0])


def carried(group: Group, expected: int, sent: int, seconds: float = 10.0) -> tuple[int, int]:
    """What each of two ends had acknowledged of an all-gather of `sent` bytes, when it was so much, or in the end."""
    ends = [LinkStatistics(group.sockets[rank], ["zero", "one"]) for rank in range(2)]
    for each in (group.sockets[0][1], group.sockets[1][0]):
        while in_flight(each):  # of the greeting
            pass
    before = [next(iter(end.read().values())).acknowledged_bytes for end in ends]
    mine = torch.zeros(sent, dtype=torch.uint8)
    group.answers([AllGather((mine,)), AllGather((mine,))])
    deadline = time.monotonic() + seconds
    while True:  # the last acknowledgment is on its way
        now = [next(iter(end.read().values())).acknowledged_bytes for end in ends]
        used = now[0] - before[0], now[1] - before[1]
        if used == (expected, expected) or time.monotonic() > deadline:
            return used


@pytest.mark.parametrize("sent", [1, MESSAGE, 5 * MESSAGE + 17])
def test_acknowledged_bytes_are_the_bytes_that_were_sent(sent: int) -> None:
    expected = sent + HEADER_BYTES * -(-sent // MESSAGE)
    with Group(2) as group:
        assert carried(group, expected, sent) == (expected, expected)


def test_a_byte_more_would_be_noticed() -> None:
    expected = 1 + 100 + HEADER_BYTES
    with Group(2) as group:
        assert carried(group, expected, 100, seconds=0.2) == (expected - 1, expected - 1)


def test_what_closes_keeps_its_last_numbers() -> None:
    told: list[LinksOpened] = []
    end = events.subscribe(lambda event: told.append(event) if isinstance(event, LinksOpened) else None)
    links = Links(((0.0, 0.02), (0.02, 0.0)), (8e6, 16e6), (24e6, 4e6), ((0.0, 0.0),) * 2)
    with Group(2) as group:
        report_links(group.meshes[0], group.sockets[0], ["zero", "one"], links)
        end()
        group.answers([AllGather((torch.zeros(1000),))] * 2)
        (opened,) = told
        assert (opened.round_trips, opened.bytes_per_second) == ({"one": 0.02}, {"one": 0.5e6})
        assert opened.is_open()
        assert opened.relays == {}
    assert not opened.is_open()
    assert opened.read()["one"].acknowledged_bytes >= 4000


@pytest.mark.parametrize(("rank", "named"), [(None, ""), (2, "two")])
def test_relayed_peers_are_reported_with_the_worker_at_their_relay(rank: int | None, named: str) -> None:
    """A relay connects ranks 0 and 1; rank 2, if it is on the relay's machine, is connected directly."""
    told: list[LinksOpened] = []
    end = events.subscribe(lambda event: told.append(event) if isinstance(event, LinksOpened) else None)
    alone, relayed = ((0.0,) * 3,) * 3, ((0, 1, 0), (1, 0, 1 if rank == 2 else 0), (0, 1 if rank == 2 else 0, 0))
    links = replace(Links.alike(alone, 8e6), relays=(RelayLine(7, rank, 8e6, 8e6),), relayed=relayed)
    with Group(3) as group:
        report_links(group.meshes[1], group.sockets[1], ["zero", "one", "two"], links)
        end()
    assert told[0].relays == {"zero": named}


def test_a_forked_child_reads_nothing_of_its_parent() -> None:
    told: list[LinksOpened] = []
    end = events.subscribe(lambda event: told.append(event) if isinstance(event, LinksOpened) else None)
    with Group(2) as group:
        report_links(group.meshes[0], group.sockets[0], ["zero", "one"], Links.alike(((0.0, 0.0),) * 2, 1.0))
        end()
        child = os.fork()
        if not child:
            os._exit(int(told[0].is_open()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert told[0].is_open()
        group.answers([AllGather((torch.zeros(10),))] * 2)


def test_processes_are_told_with_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    here = f"{socket.gethostname()} {os.getpid()}"
    assert (process_name(), process_name(fixed=False)) == (f"{here} 5", here)
    assert parse_declarations([declared("ring"), declared("tree", fixed=False)]) == (
        ["ring", "tree"],
        [f"{here} 5", here],
        ["cpu", "cpu"],
    )
