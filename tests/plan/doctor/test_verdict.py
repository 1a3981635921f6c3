from __future__ import annotations

from dataclasses import replace

import pytest

from gossamer.plan.doctor.link_statistics import pairs
from gossamer.plan.doctor.report import DoctorReport, HostReport, PairReport
from gossamer.plan.doctor.verdict import differing, farther, rate_text, round_trip_text, slower, verdict


def host(rank: int, address: str = "") -> HostReport:
    return HostReport(
        rank=rank, name="lab", address=address or f"10.77.0.{rank + 1}", interface="eth0", gossamer="0.1.0",
        torch="2.13.0", python="3.11.7", nccl=None, cores=8, memory_bytes=64_000_000_000, gpus=(), load_average=0.1,
        clock_offset_seconds=0.0,
    )  # fmt: skip


def pair(first: int, second: int, forth: float = 94e6, back: float = 94e6, seconds: float = 0.021) -> PairReport:
    return PairReport(
        ranks=(first, second), minimum_round_trip_seconds=seconds, median_round_trip_seconds=seconds,
        forth_bits_per_second=forth, back_bits_per_second=back, clock_offset_seconds=0.0,
    )  # fmt: skip


def report(*found: PairReport) -> DoctorReport:
    world = 1 + max(max(each.ranks) for each in found)
    return DoctorReport(
        hosts=tuple(map(host, range(world))), pairs=found, seconds=1.0, backend="gloo", join_seconds=0.1
    )


FOUR = tuple(pair(a, b) for a, b in pairs(4))


def test_all_alike() -> None:
    assert verdict(report(*FOUR)) == "4 hosts, 94 Mbit/s, 21 ms"
    assert verdict(report(pair(0, 1))) == "2 hosts, 94 Mbit/s, 21 ms"


@pytest.mark.parametrize("world", [3, 4, 6])
def test_a_slow_host_is_named(world: int) -> None:
    last = world - 1
    found = [pair(a, b, 19e6, 19e6) if b == last else pair(a, b) for a, b in pairs(world)]
    assert verdict(report(*found)) == f"{world} hosts, 94 Mbit/s, 21 ms, host {last} is 4.9x slower"


def test_a_line_may_be_slow_in_one_direction() -> None:
    found = [pair(a, b, back=10e6) if b == 3 else pair(a, b) for a, b in pairs(4)]
    assert verdict(report(*found)) == "4 hosts, 94 Mbit/s, 21 ms, host 3 sends 9.4x slower"
    found = [pair(a, b, forth=10e6) if a == 0 else pair(a, b, forth=94e6) for a, b in pairs(4)]
    assert verdict(report(*found)).endswith("host 0 sends 9.4x slower")
    found = [pair(a, b, forth=10e6) if b == 3 else pair(a, b) for a, b in pairs(4)]
    assert verdict(report(*found)).endswith("host 3 receives 9.4x slower")


def test_of_two_neither_is_to_blame() -> None:
    assert verdict(report(pair(0, 1, forth=10e6, back=90e6))).endswith("host 0 sends 9x slower than it receives")
    assert verdict(report(pair(0, 1, forth=90e6, back=10e6))).endswith("host 1 sends 9x slower than it receives")


def test_a_far_host_is_named() -> None:
    found = [pair(a, b, seconds=0.08 if b == 3 else 0.002) for a, b in pairs(4)]
    assert verdict(report(*found)) == "4 hosts, 94 Mbit/s, 2 ms, host 3 is 80 ms away"


def test_small_differences_of_small_round_trips_are_nothing() -> None:
    assert (
        farther({(0, 1): 0.00003, (1, 0): 0.00003, (0, 2): 0.0003, (2, 0): 0.0003, (1, 2): 0.0003, (2, 1): 0.0003})
        == {}
    )


def test_two_sites_are_a_range() -> None:
    found = [pair(a, b, *([90e6] * 2 + [0.001] if (a < 2) == (b < 2) else [10e6] * 2 + [0.08])) for a, b in pairs(4)]
    assert verdict(report(*found)) == "4 hosts, 10 Mbit/s to 90 Mbit/s, 1 ms to 80 ms"


def test_slower_takes_a_rank_by_its_best_line() -> None:
    even = {ends: 1.0 for pair in pairs(3) for ends in (pair, pair[::-1])}
    assert slower(even) == {}
    assert slower(even | {(0, 2): 5.0, (2, 0): 5.0}) == {}  # one path, and both have a better one


def test_workers_of_one_machine_are_no_hosts() -> None:
    found = report(
        *(pair(a, b, 19e9, 19e9, 0.00003) if b == 2 else pair(a, b, 94e9, 94e9, 0.00003) for a, b in pairs(3))
    )
    together = replace(found, hosts=tuple(host(rank, "127.0.0.1") for rank in range(3)))
    assert verdict(together) == "3 workers on 1 host, 94 Gbit/s, 0.03 ms, rank 2 is 4.9x slower"
    spread = replace(found, hosts=tuple(host(rank, f"10.0.0.{rank // 2}") for rank in range(3)))
    assert verdict(spread).startswith("3 workers on 2 hosts, ")


def test_pairs_that_cannot_communicate_are_named() -> None:
    broken = PairReport(ranks=(1, 2), problems=("rank 1 cannot reach rank 2 at 10.77.0.3 (timed out)",))
    found = report(pair(0, 1), pair(0, 2), broken)
    assert verdict(found) == "3 hosts, 94 Mbit/s, 21 ms, pair 1-2 cannot communicate"
    assert not found.healthy
    assert report(pair(0, 1)).healthy
    alone = report(replace(broken, ranks=(0, 1)))
    assert verdict(alone) == "2 hosts, no pair could be measured, pair 0-1 cannot communicate"


def test_a_group_that_does_not_come_up_is_reported() -> None:
    found = replace(report(pair(0, 1)), join_problem="gloo refused")
    assert verdict(found).endswith(", no process group was created")
    assert not found.healthy


def test_differences_between_hosts_are_reported() -> None:
    found = report(*FOUR)
    assert differing(found.hosts) == ()
    other = replace(found.hosts[2], torch="2.12.0", clock_offset_seconds=-2.1)
    unlike = replace(found, hosts=(*found.hosts[:2], other, found.hosts[3]))
    assert differing(unlike.hosts) == ("torch",)
    assert verdict(unlike).endswith("21 ms, versions of torch differ, clocks are 2.1 s apart")
    unknown = replace(found.hosts[3], clock_offset_seconds=None)
    assert "clocks" not in verdict(replace(found, hosts=(*found.hosts[:3], unknown)))


def test_numbers_for_people() -> None:
    rates = [800, 5600, 999_960, 5_600_000, 94_400_000, 999_900_000, 30e9]
    assert list(map(rate_text, rates)) == [
        "800 bit/s", "5.6 kbit/s", "1.0 Mbit/s", "5.6 Mbit/s", "94 Mbit/s", "1.0 Gbit/s", "30 Gbit/s",
    ]  # fmt: skip
    assert [round_trip_text(seconds) for seconds in (0.000035, 0.0012, 0.00999, 0.0213)] == [
        "0.035 ms", "1.2 ms", "10 ms", "21 ms",
    ]  # fmt: skip
