from collections import deque
from contextlib import suppress
from math import inf

import pytest

from gossamer.comm.network.model import Path
from gossamer.comm.network.tcp_model import Stream, Tcp

TCP = Tcp()


def test_headers_and_acknowledgements_are_counted():
    assert TCP.segment_bytes == 1448
    assert TCP.wire_bytes(1) == 1 + 52
    assert TCP.wire_bytes(10 * 1448) == 15000 + 5 * 52
    assert Tcp(mtu_bytes=9000).wire_bytes(8948) == 9000


def test_loss_holds_one_stream_to_mathis_bound():
    bound = TCP.most_bits_per_second(Path(round_trip_seconds=0.08, loss=0.001))
    assert bound == pytest.approx(5.6e6, rel=0.01)
    assert TCP.most_bits_per_second(Path(round_trip_seconds=0.08)) == inf
    assert TCP.most_bits_per_second(Path(round_trip_seconds=0.08, loss=0.004)) == pytest.approx(bound / 2)


def test_rare_loss_on_long_paths_leaves_cubic_more_than_reno():
    path = Path(round_trip_seconds=0.2, loss=1e-6)
    assert TCP.most_bits_per_second(path) == pytest.approx(1.054 * (0.2 / 1e-6) ** 0.75 * 1448 * 8 / 0.2)


def stream():
    return Stream(TCP.initial_window_bytes)


LINE = 80e6  # 10 bytes a microsecond
LONG = Path(round_trip_seconds=0.1)


def test_a_full_window_waits_for_a_round_trip():
    assert stream().send(0.0, 14_480, LINE, LONG, TCP) == pytest.approx(0.001448)
    assert stream().send(0.0, 14_480 + 10, LINE, LONG, TCP) == pytest.approx(0.1, rel=0.01)
    assert stream().send(0.0, 3 * 14_480 + 10, LINE, LONG, TCP) == pytest.approx(0.2, rel=0.01)
    assert stream().send(0.0, 7 * 14_480 + 10, LINE, LONG, TCP) == pytest.approx(0.3, rel=0.02)
    assert stream().send(0.0, 3 * 14_480 + 10, LINE, Path(), TCP) == pytest.approx(3 * 0.001448 + 1e-6)


def check_messages(send):
    """Seven windows' worth, in messages that each fit into one."""
    now = 0.0
    for _ in range(70):
        now = send(now, 1448, LINE, LONG, TCP)
    assert now == pytest.approx(0.2, rel=0.05)


def test_what_is_under_way_fills_a_window_in_many_messages_as_in_one():
    check_messages(stream().send)


def test_messages_that_each_have_a_window_are_noticed():
    with pytest.raises(AssertionError):
        check_messages(lambda now, *what: now + stream().send(0.0, *what))


def test_a_window_that_grew_is_kept_and_lost_in_silence():
    warm = stream()
    first = warm.send(0.0, 100_000, LINE, LONG, TCP)
    again = first + 0.1  # when all has been heard
    assert warm.send(again, 100_000, LINE, LONG, TCP) - again == pytest.approx(0.01)
    rested = warm.free_seconds + 30
    assert warm.send(rested, 100_000, LINE, LONG, TCP) - rested == pytest.approx(first)
    assert warm.window_bytes > 50_000


@pytest.mark.parametrize(("silence", "halvings"), [(0.29, 0), (0.31, 1), (0.61, 2), (30.0, 100)])
def test_every_timeout_of_silence_halves_the_window(silence, halvings):
    warm = stream()
    warm.send(0.0, 1_000_000, LINE, LONG, TCP)
    warm.send(warm.free_seconds + 0.15, 10, LINE, LONG, TCP)  # all has been heard
    before = warm.window_bytes
    assert before > 400_000
    warm.send(warm.free_seconds + silence, 10, LINE, LONG, TCP)
    assert warm.window_bytes == pytest.approx(max(before / 2**halvings, TCP.initial_window_bytes), abs=20)


def spaced(nbytes):
    quiet = stream()
    for place in range(20):
        quiet.send(0.15 * place, nbytes, LINE, LONG, TCP)
    return quiet.window_bytes


def test_small_messages_do_not_open_the_window():
    assert spaced(1000) == TCP.initial_window_bytes
    assert spaced(10_000) > TCP.initial_window_bytes


def test_the_loss_that_allows_a_rate_is_the_bound_the_other_way_round():
    for loss in (0.001, 0.01):
        path = Path(round_trip_seconds=0.05, loss=loss)
        assert TCP.most_loss(0.05, TCP.most_bits_per_second(path)) == pytest.approx(loss, rel=0.01)
    assert TCP.most_loss(0.05, 0.0) == TCP.most_loss(0.0, 1e9) == 1.0


# -- slow start on long paths, beside packets one by one and beside a closed form


def by_packets(nbytes, line, round_trip, window):
    """When the last of `nbytes` leaves, where every packet is acknowledged by itself a round trip later."""
    now, under_way, unheard = 0.0, 0.0, deque()
    while nbytes > 0:
        while unheard and unheard[0][0] <= now:
            _, heard = unheard.popleft()
            under_way, window = under_way - heard, window + heard
        packet = min(TCP.mtu_bytes, nbytes)
        if under_way + packet > window + 1e-6:
            now = unheard[0][0]
            continue
        now += 8 * packet / line
        nbytes, under_way = nbytes - packet, under_way + packet
        unheard.append((now + round_trip, packet))
    return now


def in_closed_form(nbytes, line, round_trip, window):
    """A round trip for every window that does not fill the line, each twice as large as the one before.

    source: Cardwell, Savage & Anderson 2000, INFOCOM, without loss and delayed acknowledgements
    """
    waited = 0.0
    while nbytes > window and window < line / 8 * round_trip:
        waited, nbytes, window = waited + round_trip, nbytes - window, 2 * window
    return waited + 8 * nbytes / line


COLD = [
    (nbytes, line, round_trip)
    for nbytes in (5e4, 1e6, 1e7)
    for line in (5e6, 20e6, 1e8, 1e9)
    for round_trip in (0.005, 0.02, 0.08, 0.15)
]


def check_cold(nbytes, line, round_trip, kind=Stream):
    window = TCP.initial_window_bytes
    told = kind(window).send(0.0, nbytes, line, Path(round_trip_seconds=round_trip), TCP)
    assert told == pytest.approx(by_packets(nbytes, line, round_trip, window), rel=0.03)
    assert told == pytest.approx(in_closed_form(nbytes, line, round_trip, window), rel=0.08)


@pytest.mark.parametrize(("nbytes", "line", "round_trip"), COLD)
def test_a_cold_stream_takes_as_long_as_its_packets(nbytes, line, round_trip):
    check_cold(nbytes, line, round_trip)


class InQuarters(Stream):
    """Waits until there is room for a quarter of a window."""

    def send(self, start, nbytes, line_bits_per_second, path, tcp):
        rate, now, left = line_bits_per_second / 8, start, nbytes
        while left > 0 and self.window_bytes < rate * path.round_trip_seconds:
            self.acknowledge(now)
            part = min(left, self.window_bytes / 4)
            if self._under_way_bytes + part > self.window_bytes + 1:
                now = self._unheard[0][0]
                continue
            now, left = now + part / rate, left - part
            self._unheard.append((now + path.round_trip_seconds, part))
            self._under_way_bytes += part
            self._most_bytes = max(self._most_bytes, self._under_way_bytes)
        return now + left / rate


class OneMoreEachTime(Stream):
    """Grows by a packet in a round trip, as after slow start."""

    def acknowledge(self, now):
        before = self.window_bytes
        super().acknowledge(now)
        self.window_bytes = before + (self.window_bytes - before) * TCP.segment_bytes / before


@pytest.mark.parametrize("broken", [InQuarters, OneMoreEachTime])
def test_a_stream_that_starts_more_slowly_is_noticed(broken):
    noticed = 0
    for case in COLD:
        with suppress(AssertionError):
            check_cold(*case, broken)
            continue
        noticed += 1
    assert noticed > len(COLD) / 4
