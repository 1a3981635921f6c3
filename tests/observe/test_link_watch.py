"""Link watch: rows are what connections carried since before, and a rate is told only where it is the connection's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gossamer.events import LinkCounters, LinksOpened
from gossamer.observe.aside_log import AsideLog
from gossamer.observe.event_log import Entry
from gossamer.observe.link_watch import MOST_ROWS, LinkWatch, full_rate

IDLE = LinkCounters(0.02, 0, 0, 0.0, 0.0, limited=True)
FULL = LinkCounters(0.02, 500_000, 3, 0.0625, 1e7, limited=False)  # 200 kB are on the way at once


class Group:
    """Connections whose counters a test sets."""

    def __init__(self, peers: int = 1) -> None:
        self.now = {f"host {peer}": IDLE for peer in range(peers)}
        self.stands = True

    @property
    def opened(self) -> LinksOpened:
        return LinksOpened(
            round_trips=dict.fromkeys(self.now, 0.02),
            bytes_per_second=dict.fromkeys(self.now, 1.25e7),
            read=lambda: self.now,
            is_open=lambda: self.stands,
        )


@pytest.mark.parametrize(
    ("counters", "used", "rate"),
    [
        (FULL, 200_000, 4e5),
        (FULL, 199_999, None),  # the rate may be older than these bytes
        (replace(FULL, limited=True), 500_000, None),  # the sender had no more to send
        (replace(FULL, flight_bytes_per_second=0.0), 500_000, None),  # the kernel does not say
    ],
)
def test_a_rate_is_a_connections_where_it_was_full(counters: LinkCounters, used: int, rate: float | None) -> None:
    assert full_rate(counters, used, 0.5) == rate


def test_a_kernel_that_does_not_say_how_long_it_was_busy_tells_no_rate() -> None:
    assert full_rate(FULL, 500_000, 0.0) is None


def test_first_rows_are_what_was_measured_and_later_ones_what_was_carried_since() -> None:
    watch, group = LinkWatch(), Group()
    (first,) = watch.opened(group.opened)
    assert first == {
        "process": "host 0",
        "round_trip": 0.02,
        "bytes_per_second": 12_500_000,
        "used_bytes": 0,
        "retransmits": 0,
    }
    assert watch.sample() == []  # it has carried nothing
    group.now = {"host 0": FULL}
    assert [(row["used_bytes"], row["retransmits"], row["bytes_per_second"]) for row in watch.sample()] == [
        (500_000, 3, 8_000_000)
    ]
    group.now = {"host 0": replace(FULL, acknowledged_bytes=500_100, limited=True)}
    assert [(row["used_bytes"], row["retransmits"], row["bytes_per_second"]) for row in watch.sample()] == [
        (100, 0, None)
    ]


@pytest.mark.parametrize("peers", [1, MOST_ROWS, 63, 255])
def test_many_peers_take_turns_and_no_byte_is_lost(peers: int) -> None:
    watch, group = LinkWatch(), Group(peers)
    watch.opened(group.opened)
    watch.sample()
    rows, most = 0, 0
    for sample in range(1, 41):
        group.now = {name: replace(FULL, acknowledged_bytes=1000 * sample) for name in group.now}
        found = watch.sample()
        most, rows = max(most, len(found)), rows + sum(row["used_bytes"] for row in found)
    assert most <= MOST_ROWS
    group.stands = False
    rows += sum(row["used_bytes"] for row in watch.sample())
    assert rows == peers * 40_000
    assert watch.sample() == []  # a closed group is forgotten


def test_two_groups_of_the_same_peer_are_told_apart_and_add_up() -> None:
    watch, one, two = LinkWatch(), Group(), Group()
    watch.opened(one.opened)
    watch.opened(two.opened)
    one.now, two.now = {"host 0": FULL}, {"host 0": replace(FULL, acknowledged_bytes=7)}
    assert sorted(row["used_bytes"] for row in watch.sample()) == [7, 500_000]


def test_the_aside_log_tells_of_links_when_they_open_and_when_they_carry() -> None:
    told: list[Entry] = []
    log, group = AsideLog(told.append, clock=lambda: 3.0), Group()
    log(group.opened)
    log.links()
    group.now = {"host 0": FULL}
    log.links()
    assert [(each["kind"], each["moment"], len(each["links"])) for each in told] == [("links", 3.0, 1)] * 2
    assert json.loads(json.dumps(told)) == told
