from math import inf

import pytest

from gossamer.network.link import Path
from gossamer.network.tcp import Stream, Tcp

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
    assert stream().send(0.0, 3 * 14_480 + 10, LINE, LONG, TCP) == pytest.approx(0.2 + 1e-6)
    assert stream().send(0.0, 3 * 14_480 + 10, LINE, Path(), TCP) == pytest.approx(3 * 0.001448 + 1e-6)


def test_a_window_that_grew_is_kept_and_lost_in_silence():
    warm = stream()
    first = warm.send(0.0, 100_000, LINE, LONG, TCP)
    assert warm.send(first, 100_000, LINE, LONG, TCP) - first == pytest.approx(0.01)
    rested = warm.free_seconds + 30
    assert warm.send(rested, 100_000, LINE, LONG, TCP) - rested == pytest.approx(first)
    assert warm.window_bytes > 100_000


def test_a_short_silence_halves_the_window():
    warm = stream()
    warm.send(0.0, 1_000_000, LINE, LONG, TCP)
    before = warm.window_bytes
    warm.send(warm.free_seconds + 0.31, 10, LINE, LONG, TCP)
    assert warm.window_bytes == before / 2


def test_small_messages_do_not_open_the_window():
    quiet = stream()
    for _ in range(100):
        quiet.send(quiet.free_seconds, 1000, LINE, LONG, TCP)
    assert quiet.window_bytes == TCP.initial_window_bytes
