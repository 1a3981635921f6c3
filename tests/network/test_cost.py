import pytest
import torch

from gossamer.network import Host, Network, Path, read_network
from gossamer.network.cost import Lines, seconds
from gossamer.words import Exchange, Gather, Mean, Mix, Together

WORKERS = 4
ROUND_TRIP = 0.02
BYTE = 8 / 100e6  # seconds on the line below
OVERHEAD = 1526 / 1448  # headers, and acknowledgements of as much the other way
NETWORK = read_network("100mbit,20ms", WORKERS)


def floats(numel, dtype=torch.float32):
    return torch.empty(numel, dtype=dtype, device="meta")


def octets(nbytes):
    return floats(nbytes, torch.uint8)


def warm(word, network=NETWORK, rounds=6):
    """Seconds a word takes over connections that carried it before."""
    lines = Lines(network)
    world = len(network.hosts)
    ends = [0.0] * world
    for _ in range(rounds):
        begins = ends
        ends = lines.answer([word] * world, begins)
    return max(ends) - max(begins)


def test_small_words_cost_round_trips():
    assert seconds(Mean(floats(100)), NETWORK) == pytest.approx(2 * ROUND_TRIP, rel=0.01)
    assert seconds(Gather((octets(100),)), NETWORK) == pytest.approx(ROUND_TRIP, rel=0.02)
    assert seconds(Exchange((((octets(100)),),) * WORKERS), NETWORK) == pytest.approx(ROUND_TRIP, rel=0.02)
    assert seconds(Mean(floats(100, torch.bfloat16)), NETWORK) == pytest.approx(2 * ROUND_TRIP, rel=0.02)


def test_large_words_cost_bytes_over_the_rate():
    numel = 5_000_000
    share = 3 / 4 * BYTE * OVERHEAD * 4 * numel
    assert warm(Mean(floats(numel))) == pytest.approx(2 * share + ROUND_TRIP, rel=0.02)
    assert warm(Mean(floats(numel, torch.bfloat16))) == pytest.approx(share + 2 * ROUND_TRIP, rel=0.02)
    assert warm(Gather((octets(numel),))) == pytest.approx(share + ROUND_TRIP, rel=0.02)


def test_segments_pay_for_the_round_trip_while_they_are_small():
    """Measured on an emulated network: 541 ms and 1.68 s."""
    assert warm(Mean(floats(1_000_000))) == pytest.approx(0.541, rel=0.05)
    assert warm(Mean(floats(3_250_000))) == pytest.approx(1.676, rel=0.05)


def test_what_goes_straight_pays_for_one_hop_each():
    """Measured on an emulated network, its machine busy: 54, 95 and 177 ms; 26, 51 and 280 ms for the gathers."""
    assert warm(Mean(floats(25_000))) == pytest.approx(0.0527, rel=0.01)
    assert warm(Mean(floats(100_000))) == pytest.approx(0.0907, rel=0.01)
    assert warm(Mean(floats(250_000))) == pytest.approx(0.1665, rel=0.01)
    assert warm(Gather((octets(20_000),))) == pytest.approx(0.0251, rel=0.01)
    assert warm(Gather((octets(100_000),))) == pytest.approx(0.0453, rel=0.01)
    assert warm(Gather((octets(1_000_000),))) == pytest.approx(0.2729, rel=0.01)


def test_the_first_word_finds_windows_small():
    word = Mean(floats(100_000))
    assert warm(word, rounds=1) > warm(word) + ROUND_TRIP


def test_the_slowest_line_decides():
    fast = Host(up_bits_per_second=100e6, down_bits_per_second=100e6)
    slow = Host(up_bits_per_second=10e6, down_bits_per_second=100e6)
    word = Gather((octets(1_000_000),))
    alike = warm(word, Network(hosts=(fast,) * 4))
    assert warm(word, Network(hosts=(fast, fast, slow, fast))) == pytest.approx(10 * alike, rel=0.05)
    assert warm(word, Network(hosts=(slow, fast, fast, fast))) == pytest.approx(10 * alike, rel=0.05)


def test_what_goes_straight_crosses_an_ocean_once():
    host = {"up_bits_per_second": 100e6, "down_bits_per_second": 100e6}
    west, east = Host(site="west", **host), Host(site="east", **host)
    ocean = {frozenset(("west", "east")): Path(round_trip_seconds=0.1)}
    once = Network(hosts=(west, west, west, east), paths=ocean)
    assert warm(Gather((octets(10),)), once) == pytest.approx(0.1, rel=0.01)
    apart = Network(hosts=(west, west), paths=ocean)
    assert warm(Gather((octets(10),)), apart) < 0.001


def test_loss_slows_one_stream_but_not_many():
    lossy = read_network("20mbit,80ms,loss=0.1%", WORKERS)
    mean, exchange = Mean(floats(1_000_000)), Exchange((((octets(1_000_000)),),) * WORKERS)
    assert warm(mean, lossy) == pytest.approx(6e6 * OVERHEAD * 8 / 5.6e6, rel=0.05)
    assert warm(exchange, lossy) < 1e6 * OVERHEAD * 8 / 5.6e6 + 0.2


def test_words_said_together_share_the_line_and_the_round_trips():
    mean, gather = Mean(floats(500_000)), Gather((octets(500_000),))
    line = (3e6 + 1.5e6) * OVERHEAD * BYTE
    assert line < warm(Together((mean, gather))) < warm(mean) + warm(gather)
    small = Together((Mean(floats(10)), Gather((octets(10),))))
    assert seconds(small, NETWORK) == pytest.approx(seconds(Mean(floats(10)), NETWORK), rel=0.01)


def test_whoever_comes_late_keeps_the_others():
    lines = Lines(NETWORK)
    ends = lines.answer([Gather((octets(10),))] * 4, [0.0, 0.0, 5.0, 0.0])
    assert min(ends) > 5.0


def test_a_world_of_one_sends_nothing():
    assert Lines(read_network("100mbit,20ms", 1)).answer([Mean(floats(10**6))], [3.0]) == [3.0]


def test_neighbours_cost_a_round_trip_and_their_bytes():
    pairs = [Mix((octets(1_000_000),), ((1 - rank, 0.5), (rank, 0.5))) for rank in range(2)]
    ends = Lines(read_network("100mbit", 2)).answer(pairs, [0.0, 0.0])
    assert max(ends) == pytest.approx(1e6 * OVERHEAD * BYTE, rel=0.01)


def test_a_broadcast_goes_down_a_tree():
    ends = Lines(NETWORK).broadcast(10, [0.0] * 4)
    assert max(ends) == pytest.approx(0.03, rel=0.01)  # 1 and 2 were ready and hear at once; 3 hears from 1


def test_jitter_adds_its_deviation_each_way():
    shaky = read_network("100mbit,20ms,jitter=2ms", WORKERS)
    calm = seconds(Gather((octets(10),)), NETWORK)
    assert seconds(Gather((octets(10),)), shaky) == pytest.approx(calm + 2 * 0.002)
