import pytest

from gossamer.comm.network import Host, Network, Path, read_network
from gossamer.comm.network.cost.message_schedule import (
    Collect,
    RankTurn,
    Receive,
    ReceiveCompleted,
    Send,
    SendCompleted,
)
from gossamer.comm.network.cost.message_simulator import Wires
from gossamer.comm.network.tcp_model import ETHERNET

MEGABYTE = ETHERNET.wire_bytes(10**6 + 16) * 8 / 100e6  # seconds on the lines below
HOST = {"up_bits_per_second": 100e6, "down_bits_per_second": 100e6}


def told(to, nbytes):
    return Send(to, nbytes, eager=True)


def run(network, *moves, starts=None):
    wires = Wires(network, window_bytes=float("inf"))
    return wires.run([[iter(each)] for each in moves], starts or [0.0] * len(moves))


def test_an_eager_message_takes_half_a_round_trip_and_another_a_whole_one():
    network = read_network("100mbit,1s", 2)
    assert run(network, [told(1, 1)], [Collect(0)]) == pytest.approx([0.0, 0.5], abs=1e-4)
    assert run(network, [Send(1, 1), SendCompleted()], [Receive(0), ReceiveCompleted()]) == pytest.approx(
        [0.5, 1.0], abs=1e-4
    )


def test_a_peer_that_sent_is_done_when_it_has_left_and_who_hears_when_it_is_there():
    network = read_network("100mbit,1s", 2)
    assert run(network, [told(1, 10**6)], [Collect(0)]) == pytest.approx([MEGABYTE, MEGABYTE + 0.5])


def test_what_came_before_one_listened_is_heard_at_once():
    assert run(read_network("100mbit,1s", 2), [told(1, 1)], [Collect(0)], starts=[0.0, 9.0])[1] == 9.0


def test_messages_of_one_peer_are_not_taken_for_those_of_another():
    network = read_network("100mbit,1s", 3)
    ends = run(network, [told(2, 1)], [told(2, 1)], [Collect(1), Collect(0)], starts=[0.0, 5.0, 0.0])
    assert ends[2] == pytest.approx(5.5, abs=1e-4)
    one = run(network, [told(2, 1)], [told(2, 1)], [Collect(0)], starts=[0.0, 5.0, 0.0])
    assert one[2] == pytest.approx(0.5, abs=1e-4)


def check_order_of_turns(first, second):
    """Two exchanges begin at once; the line carries the lower turn first."""
    wires = Wires(read_network("100mbit", 3), window_bytes=float("inf"))
    moves = [[iter([first, told(1, 10**6)]), iter([second, told(2, 10**6)])], [iter([Collect(0)])], [iter([])] * 2]
    moves[2][1] = iter([Collect(0)])
    ends = wires.run(moves, [0.0] * 3)
    assert ends[1:] == pytest.approx([2 * MEGABYTE, MEGABYTE])


def test_turns_say_what_leaves_first():
    check_order_of_turns(RankTurn(2), RankTurn(1))
    with pytest.raises(AssertionError):
        check_order_of_turns(RankTurn(1), RankTurn(2))


def check_the_line_is_shared():
    """Three megabytes wait for an ocean's window; what goes next door does not."""
    hosts = tuple(Host(site=site, **HOST) for site in ("west", "west", "east"))
    network = Network(hosts=hosts, paths={frozenset(("west", "east")): Path(round_trip_seconds=0.5)})
    moves = [[told(2, 10**6)] * 3 + [told(1, 10**6)], [Collect(0)], [Collect(0)] * 3]
    ends = Wires(network).run([[iter(each)] for each in moves], [0.0] * 3)
    assert ends[1] < 5 * MEGABYTE < ends[2]


def test_a_slow_connection_does_not_keep_the_line_from_others(monkeypatch):
    check_the_line_is_shared()
    monkeypatch.setattr(Wires, "post", Wires.start)  # everything is on the line at once, in its order
    with pytest.raises((AssertionError, IndexError)):
        check_the_line_is_shared()


def test_exchanges_of_some_ranks_only():
    wires = Wires(read_network("100mbit,1s", 3))
    ends = wires.run([[iter([told(1, 1)])], [iter([Collect(0)])], []], [0.0] * 3)
    assert ends == pytest.approx([0.0, 0.5, 0.0], abs=1e-4)
