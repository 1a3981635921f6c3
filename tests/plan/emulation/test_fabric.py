from __future__ import annotations

from gossamer.comm.network import Host, Network, Path, read_network
from gossamer.plan.emulation.fabric import bucket, joined_bytes, line_queue_bytes, queue_bytes
from gossamer.plan.emulation.tun_switch import joins, shared_lines, slowest


def test_queues_hold_the_longest_path_and_never_less_than_a_switch_does() -> None:
    assert queue_bytes(read_network("1gbit,80ms", 2), 0) == 10_000_000
    assert queue_bytes(read_network("1gbit", 2), 0) == 1_250_000
    assert queue_bytes(read_network("1mbit,20ms", 2), 0) == 256 << 10
    hosts = tuple(Host(up_bits_per_second=1e9, down_bits_per_second=1e9, site=site) for site in "aab")
    far = Network(hosts=hosts, paths={frozenset("ab"): Path(round_trip_seconds=0.08)})
    assert [queue_bytes(far, host) for host in range(3)] == [10_000_000] * 3


def test_packets_are_joined_as_far_as_a_millisecond_goes() -> None:
    assert [joined_bytes(rate) for rate in (1e6, 100e6, 1e9)] == [125, 12500, 65536]
    assert joins(read_network("100mbit,20ms", 2))
    assert not joins(read_network("10mbit,20ms", 2))
    assert not joins(read_network("1gbit,20ms,loss=0.1%", 2))
    assert not joins(read_network("1gbit,20ms,jitter=1ms", 2))


def test_buckets_count_ip_bytes() -> None:
    assert (
        bucket("eth0", 100e6, 100e6, 1000)
        == "qdisc replace dev eth0 root tbf rate 100000000bit burst 13750b limit 1000b"
    )
    assert bucket("h", 3e6, 3e6, 9, 14) == "qdisc replace dev h root tbf rate 3028000bit burst 3028b limit 9b"
    unlimited = read_network("unlimited", 1).hosts[0].up_bits_per_second
    assert "tbf" not in bucket("eth0", unlimited, unlimited, 1000)


def test_a_slower_line_keeps_the_burst_of_its_usual_rate() -> None:
    """Else the interface would never send a larger packet that waits in its queue already."""
    assert " rate 12500000bit burst 13750b " in bucket("eth0", 100e6 / 8, 100e6, 1000)
    assert " burst 27500b " in bucket("eth0", 200e6, 100e6, 1000)


def offices(shared: float | None) -> Network:
    hosts = tuple(Host(up_bits_per_second=1e9, down_bits_per_second=1e9, site=site) for site in "aab")
    return Network(hosts=hosts, paths={frozenset("ab"): Path(round_trip_seconds=0.03, bits_per_second=shared)})


def test_the_switch_is_told_which_pairs_share_a_line() -> None:
    assert list(shared_lines(offices(None))) == []
    assert list(shared_lines(offices(100e6))) == [
        "shared 100000000.0 375000",
        "through 0 2 0",
        "through 1 2 0",
        "shared 100000000.0 375000",
        "through 2 0 1",
        "through 2 1 1",
    ]
    assert line_queue_bytes(100e6, 0.03) == 375_000
    assert line_queue_bytes(1e6, 0.0) == 256 << 10


def test_packets_are_joined_as_far_as_a_shared_line_goes() -> None:
    assert [slowest(offices(shared)) for shared in (None, 2e9, 100e6)] == [1e9, 1e9, 100e6]
    assert joins(offices(100e6))
    assert not joins(offices(10e6))
