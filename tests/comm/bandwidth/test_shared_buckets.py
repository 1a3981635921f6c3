"""Token buckets in virtual time: the law of the limit, fair parts, changes of the limit, and the cap."""

from __future__ import annotations

import heapq
import mmap
import random
from itertools import pairwise

import pytest

from gossamer.comm.bandwidth.shared_buckets import DOWN, NBYTES, UP, Bandwidth, available
from gossamer.comm.network.tcp_model import ETHERNET, HEADER_BYTES

pytestmark = pytest.mark.skipif(not available(), reason="the compiled loops are missing")

ETHERNET_BYTES = 14
SECOND = 10**9
MBIT = 1e6
BURST_SECONDS, PART_SECONDS, LEAST_PART = 0.05, 0.005, 1514


def on_wire(payload):
    """Independent count: Ethernet frames of a payload."""
    packets = -(-payload // ETHERNET.segment_bytes)
    return payload + packets * (HEADER_BYTES + ETHERNET_BYTES)


def buckets(*, up=None, down=None, cap=None):
    made = Bandwidth(mmap.mmap(-1, NBYTES))
    made.limit(UP, up, 0)
    made.limit(DOWN, down, 0)
    made.set_cap(cap)
    return made


class Sender:
    """A connection in virtual time that sends `size()` bytes per call as soon as the bucket allows it."""

    def __init__(self, bandwidth, way=UP, size=lambda room: room):
        self.bandwidth, self.way, self.size, self.ticket = bandwidth, way, size, 0

    def step(self, now):
        """Returns the payload sent now, and the time of the next step."""
        room = self.bandwidth.room(self.way, self.ticket, now)
        if room <= 0:
            return 0, now - room
        payload = min(self.size(room), room)
        self.ticket = self.bandwidth.transfer(self.way, payload, now)
        return payload, now + 1


class PayloadOnly(Sender):
    """Negative control: counts payload without headers."""

    def step(self, now):
        room = self.bandwidth.room(self.way, self.ticket, now)
        if room <= 0:
            return 0, now - room
        # a transfer whose wire bytes are at most the payload that is really sent
        counted = room - on_wire(room) + room
        self.ticket = self.bandwidth.transfer(self.way, counted, now)
        return room, now + 1


def run(senders, seconds, *, events=(), begin=0, late=lambda: 0):
    """Run senders in virtual time. events: (time, function). Returns (time, sender, bytes on the wire) of each send."""
    sent, todo = [], [(begin, order, order) for order in range(len(senders))]
    events = sorted(events, key=lambda each: each[0])
    heapq.heapify(todo)
    order = len(senders)
    while todo and todo[0][0] < begin + seconds * SECOND:
        now, _, number = heapq.heappop(todo)
        while events and events[0][0] <= now:
            events.pop(0)[1]()
        payload, following = senders[number].step(now)
        if payload:
            sent.append((now, number, on_wire(payload)))
        order += 1
        heapq.heappush(todo, (following + late(), order, number))
    return sent


def excess(sent, bits_per_second, *, begin=0):
    """The most bytes by which any window [t, t + d] exceeds rate * d."""
    rate, most, lowest, total = bits_per_second / 8 / SECOND, 0.0, 0.0, 0
    for now, _, nbytes in sent:
        lowest = min(lowest, total - rate * (now - begin))
        total += nbytes
        most = max(most, total - rate * (now - begin) - lowest)
    return most


def allowance(bits_per_second, connections):
    """Burst and one part per connection."""
    rate = bits_per_second / 8
    return max(BURST_SECONDS * rate, LEAST_PART) + connections * max(PART_SECONDS * rate, LEAST_PART)


@pytest.mark.parametrize("way", [UP, DOWN])
@pytest.mark.parametrize("rate", [0.064, 5, 20, 1000, 25000], ids="{}mbit".format)
@pytest.mark.parametrize("connections", [1, 7])
def test_bytes_in_any_window_are_within_rate_and_burst(way, rate, connections):
    bandwidth = buckets(**{"up" if way == UP else "down": rate * MBIT})
    draw = random.Random(1)
    sizes = [lambda room: room, lambda room: draw.randint(1, 4000)]
    senders = [Sender(bandwidth, way, sizes[number % 2]) for number in range(connections)]
    seconds = 4 if rate < 100 else 0.1
    sent = run(senders, seconds, late=lambda: draw.randint(0, 3_000_000))
    total = sum(nbytes for *_, nbytes in sent)
    assert excess(sent, rate * MBIT) <= allowance(rate * MBIT, connections)
    if rate <= 20:
        assert total >= 0.9 * rate * MBIT / 8 * seconds - LEAST_PART


def test_a_meter_that_counts_payload_only_exceeds_the_limit():
    bandwidth = buckets(up=5 * MBIT)
    sent = run([PayloadOnly(bandwidth)], 30)
    assert excess(sent, 5 * MBIT) > allowance(5 * MBIT, 1)


def test_an_idle_connection_saves_no_more_than_the_burst():
    bandwidth = buckets(up=5 * MBIT)
    run([Sender(bandwidth)], 1)
    sent = run([Sender(bandwidth)], 2, begin=3600 * SECOND)
    assert excess(sent, 5 * MBIT, begin=3600 * SECOND) <= allowance(5 * MBIT, 1)


def test_connections_share_the_limit_equally():
    bandwidth = buckets(up=10 * MBIT)
    draw = random.Random(2)
    sent = run([Sender(bandwidth) for _ in range(5)], 5, late=lambda: draw.randint(0, 1_000_000))
    shares = [sum(nbytes for _, number, nbytes in sent if number == each) for each in range(5)]
    assert max(shares) <= 1.1 * min(shares)


def test_a_connection_without_data_leaves_its_part_to_the_others():
    bandwidth = buckets(up=10 * MBIT)
    slow = Sender(bandwidth, size=lambda room: 10)
    sent = run([Sender(bandwidth), slow], 4)
    assert sum(nbytes for *_, nbytes in sent) >= 0.95 * 4 * 10 * MBIT / 8


@pytest.mark.parametrize(("before", "after"), [(100, 1), (1, 100), (None, 2), (0.064, 20)])
def test_a_new_limit_is_effective_within_a_second(before, after):
    bandwidth = buckets(up=before and before * MBIT)
    change = 3 * SECOND
    senders = [Sender(bandwidth) for _ in range(4)]
    event = (change, lambda: bandwidth.limit(UP, after * MBIT, change))
    sent = run(senders, 8, events=[event], late=lambda: 2_000_000)  # a network limits connections without a limit
    later = [each for each in sent if each[0] >= change + SECOND]
    expected = after * MBIT / 8 * 4
    assert sum(nbytes for *_, nbytes in later) == pytest.approx(expected, rel=0.1)
    assert excess(later, after * MBIT, begin=change + SECOND) <= allowance(after * MBIT, 4)


def test_lifting_a_limit_ends_the_wait():
    bandwidth = buckets(up=1 * MBIT)
    sender = Sender(bandwidth)
    while sender.step(0)[0]:
        pass
    assert bandwidth.room(UP, sender.ticket, 1) <= 0
    bandwidth.limit(UP, None, 2)
    assert bandwidth.room(UP, sender.ticket, 3) > 0


def test_acknowledgments_use_the_other_direction():
    bandwidth = buckets(up=5 * MBIT)
    bandwidth.transfer(DOWN, 100 * ETHERNET.segment_bytes, 0)
    assert bandwidth.counted_way(UP) == 50 * (HEADER_BYTES + ETHERNET_BYTES)
    assert bandwidth.counted_way(DOWN) == on_wire(100 * ETHERNET.segment_bytes)


def test_transfers_stop_at_the_cap_and_continue_with_a_higher_one():
    bandwidth = buckets(cap=1_000_000)
    sender = Sender(bandwidth)
    sent = [sender.step(now)[0] for now in range(100)]
    assert 1_000_000 <= bandwidth.counted < 1_000_000 + 2 * max(sent)
    bandwidth.set_cap(2_000_000)
    assert sender.step(200)[0] > 0


def test_transfers_wait_until_the_launcher_has_set_the_limits():
    assert Bandwidth(mmap.mmap(-1, NBYTES)).room(UP, 0, 0) < 0


def test_processes_share_the_buckets_of_a_file(tmp_path):
    one = Bandwidth.create(tmp_path / "bandwidth")
    other = Bandwidth.open(tmp_path / "bandwidth")
    one.set_cap(None)
    one.limit(UP, 5 * MBIT)
    one.limit(DOWN, None)
    other.transfer(UP, 10_000, 0)
    assert one.counted_way(UP) == on_wire(10_000)


def test_waits_are_short_so_that_changes_are_noticed():
    bandwidth = buckets(up=0.064 * MBIT)
    ticket = bandwidth.transfer(UP, 1_000_000, 0)
    assert -0.05 * SECOND <= bandwidth.room(UP, ticket, 0) < 0


def test_tickets_of_one_bucket_are_in_order():
    bandwidth = buckets(up=5 * MBIT)
    tickets = [bandwidth.transfer(UP, 1000, 0) for _ in range(10)]
    assert all(later - sooner == on_wire(1000) for sooner, later in pairwise(tickets))
