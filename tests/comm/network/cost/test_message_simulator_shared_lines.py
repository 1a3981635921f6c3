"""Shared links between two sites, in virtual time. A message takes one second of a host's own line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from random import Random

import pytest
from support.paths import EXAMPLES

from gossamer.algorithms.collectives import (
    DirectAllReduce,
    HalvingDoubling,
    HierarchicalAllReduce,
    RingAllReduce,
    TreeAllReduce,
)
from gossamer.base.virtual_clock import VirtualClock
from gossamer.comm.network import Host, Network, Path, read_network
from gossamer.comm.network.cost.cheapest_collective import fastest, table_seconds
from gossamer.comm.network.cost.message_schedule import (
    Collect,
    Move,
    Receive,
    ReceiveCompleted,
    Send,
    SendCompleted,
    direct,
)
from gossamer.comm.network.cost.message_simulator import (
    EAGER_ENVELOPE_BYTES,
    ENVELOPE_BYTES,
    SharedLine,
    SharedLines,
    Wires,
)
from gossamer.comm.network.tcp_model import ETHERNET

BYTES = 10**6
RATE = 8 * ETHERNET.wire_bytes(BYTES + EAGER_ENVELOPE_BYTES)
TWO_OFFICES = str(EXAMPLES / "networks" / "two-offices.toml")
COLLECTIVES = (
    RingAllReduce(),
    DirectAllReduce(),
    HalvingDoubling(),
    HierarchicalAllReduce(per_node=2),
    TreeAllReduce(),
)


def hosts_at(names: str, down: float = RATE) -> tuple[Host, ...]:
    return tuple(Host(site=name, up_bits_per_second=RATE, down_bits_per_second=down) for name in names)


def sites(names: str, shared: float | None = RATE, round_trip_seconds: float = 0.0) -> Network:
    path = Path(round_trip_seconds=round_trip_seconds, bits_per_second=shared)
    return Network(hosts=hosts_at(names), paths={frozenset("we"): path})


def told(to: int, nbytes: int = BYTES) -> Move:
    return Send(to, nbytes, eager=True)


def run(network: Network, *moves: Sequence[Move], starts: Sequence[float] | None = None) -> list[float]:
    wires = Wires(network, window_bytes=inf)
    return wires.run([[iter(each)] for each in moves], starts or [0.0] * len(moves))


# -- the line alone ----------------------------------------------------------------------------------------------------


def test_a_line_carries_what_comes_one_after_the_other() -> None:
    line = SharedLine(2.0)
    assert [line.carry(2, 0.0), line.carry(2, 0.0), line.carry(2, 5.0)] == [1.0, 2.0, 6.0]
    assert line.busy == [(0.0, 2.0), (5.0, 6.0)]


def test_a_line_is_used_where_it_is_free() -> None:
    line = SharedLine(1.0)
    assert line.carry(1, 2.0) == 3.0
    assert line.carry(1, 4.0) == 5.0
    assert line.carry(4, 0.0) == 6.0  # before, between and after
    assert line.busy == [(0.0, 6.0)]
    assert line.carry(1, 7.0) == 8.0
    assert line.carry(1, 6.0) == 7.0  # just fits
    assert line.busy == [(0.0, 7.0), (7.0, 8.0)]


def test_when_a_line_is_free() -> None:
    line = SharedLine(1.0, busy=[(0.0, 2.0), (3.0, 4.0)])
    assert [line.free_at(now) for now in (0.5, 2.5, 3.0, 9.0)] == [2.0, 2.5, 4.0, 9.0]


# -- what it makes of messages -----------------------------------------------------------------------------------------


def check_two_take_twice_as_long() -> None:
    """Hosts 0 and 1 to 2 and 3, over a line of the rate of one."""
    one = run(sites("wwee"), [told(2)], [], [Collect(0)], [])
    two = run(sites("wwee"), [told(2)], [told(3)], [Collect(0)], [Collect(1)])
    assert (max(one), max(two)) == (1.0, 2.0)
    many = run(sites("wwee"), [told(2)] * 5, [told(2)] * 5, [Collect(0), Collect(1)] * 5, [])
    assert max(many) == 10.0


def test_two_who_share_a_line_take_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    check_two_take_twice_as_long()
    monkeypatch.setattr(SharedLine, "carry", lambda line, bits, begin: begin + bits / line.bits_per_second)
    with pytest.raises(AssertionError):
        check_two_take_twice_as_long()


def check_alone(shared: float) -> None:
    """Nobody else on the line: the same moments as without it, of what leaves at once or is asked for, far and near."""
    for round_trip in (0.0, 0.3):
        there, without = sites("we", shared, round_trip), sites("we", None, round_trip)
        eager = [told(1)] * 3, [Collect(0)] * 3
        asked = (
            [Send(1, BYTES), Send(1, 7), SendCompleted(), SendCompleted()],
            [Receive(0), Receive(0), ReceiveCompleted(), ReceiveCompleted()],
        )
        for moves in (eager, asked):
            assert run(there, *moves) == run(without, *moves)
            slow_start = [Wires(each).run([[iter(part)] for part in moves], [0.0] * 2) for each in (there, without)]
            assert slow_start[0] == slow_start[1]


@pytest.mark.parametrize("shared", [RATE, 3 * RATE])
def test_one_alone_is_not_slowed_by_a_line_of_its_own_rate(shared: float) -> None:
    check_alone(shared)


def test_one_alone_is_slowed_by_a_slower_line() -> None:
    assert run(sites("we", RATE / 4), [told(1)] * 2, [Collect(0)] * 2) == [8.0, 8.0]
    with pytest.raises(AssertionError):
        check_alone(RATE / 4)


def check_directions() -> None:
    there, back, both = [told(2)] * 2, [told(1)] * 2, [Collect(3)] * 2
    alone = run(sites("wwee"), there, [], [Collect(0)] * 2, [])
    assert max(alone) == 2.0
    assert run(sites("wwee"), there, both, [Collect(0)] * 2, back) == [2.0] * 4


def test_opposite_directions_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    check_directions()
    each_way = SharedLines.between
    monkeypatch.setattr(SharedLines, "between", lambda lines, a, b: each_way(lines, min(a, b), max(a, b)))
    with pytest.raises(AssertionError):
        check_directions()


def test_pairs_of_sites_have_lines_of_their_own() -> None:
    paths = {frozenset(ends): Path(bits_per_second=RATE) for ends in ("ab", "ac", "bc")}
    network = Network(hosts=hosts_at("abc"), paths=paths)
    assert run(network, [told(2)], [told(2)], [Collect(0), Collect(1)])[2] == 2.0  # by host 2's own
    wide = Network(hosts=hosts_at("aabc", down=9 * RATE), paths=paths)
    assert run(wide, [told(2)], [told(3)], [told(3), Collect(0)], [Collect(1), Collect(2)]) == [1.0] * 4


def test_what_stays_inside_a_site_never_sees_the_line() -> None:
    network = sites("wwee", RATE / 100)
    assert run(network, [told(1)] * 2, [Collect(0)] * 2, [], []) == [2.0, 2.0, 0.0, 0.0]


def moves_at_random(seed: int) -> tuple[list[list[Move]], list[float]]:
    """Messages of all sizes from each of four hosts to each, begun at various moments."""
    random = Random(seed)
    sends: list[list[Move]] = [[] for _ in range(4)]
    hears: list[list[Move]] = [[] for _ in range(4)]
    for sender in range(4):
        for _ in range(random.randint(3, 12)):
            receiver = random.choice([peer for peer in range(4) if peer != sender])
            sends[sender].append(told(receiver, random.choice((1, 1000, BYTES // 7, BYTES, 4 * BYTES))))
            hears[receiver].append(Collect(sender))
    return [sends[rank] + hears[rank] for rank in range(4)], [random.choice((0.0, 0.5, 3.0)) for _ in range(4)]


def check_a_fast_line_changes_nothing() -> None:
    """To the last bit."""
    plain, fast = (sites("wwee", shared, 0.02) for shared in (None, 2.001 * RATE))
    for seed in range(20):
        moves, starts = moves_at_random(seed)
        assert run(fast, *moves, starts=starts) == run(plain, *moves, starts=starts)
    for collective in COLLECTIVES:
        assert table_seconds(collective, BYTES, 4, fast) == table_seconds(collective, BYTES, 4, plain)
    engine = [Wires(network).run(engine_moves(), [0.0] * 4) for network in (plain, fast)]
    assert engine[0] == engine[1]


def engine_moves() -> list[list[Sequence[Move]]]:
    return [[direct(rank, 4, [BYTES] * 4)] for rank in range(4)]


def in_turn(line: SharedLine, bits: float, begin: float) -> float:
    """A broken line: what is left free before a short message that came late is lost for all others."""
    free = line.busy[-1][1] if line.busy else 0.0
    line.busy.append((begin, max(free, begin) + bits / line.bits_per_second))
    return line.busy[-1][1]


def test_a_line_faster_than_all_together_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    check_a_fast_line_changes_nothing()
    monkeypatch.setattr(SharedLine, "carry", in_turn)
    with pytest.raises(AssertionError):
        check_a_fast_line_changes_nothing()


def check_fair() -> None:
    """Who comes when others have long begun is served as they are, not after all that they would have sent by then.

    Hosts 0 and 1 begin ten messages each; at 8 s four of each are through, and host 2 sends two: two of six turns.
    """
    network = sites("wwweee")
    moves = [[told(3)] * 10, [told(4)] * 10, [told(5)] * 2, [Collect(0)] * 10, [Collect(1)] * 10, [Collect(2)] * 2]
    ends = run(network, *moves, starts=[0.0, 0.0, 8.0, 0.0, 0.0, 0.0])
    assert max(ends) == 22.0  # and never idle
    assert ends[5] <= 8.0 + 3 * 2


def runs_ahead(
    wires: Wires,
    clock: VirtualClock,
    sender: int,
    receiver: int,
    nbytes: int,
    begin: float,
    then: Callable[..., None],
) -> None:
    """A broken sender, which goes on though the line between has not taken what it sent."""
    _, passed = wires.cross(sender, receiver, nbytes, begin, clock.now)
    wires.connection(sender, receiver).stream.free_seconds = clock.now
    then(sender, receiver, nbytes, passed)


def test_a_peer_that_comes_late_is_served_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    check_fair()
    monkeypatch.setattr(Wires, "cross_at", runs_ahead)
    with pytest.raises(AssertionError):
        check_fair()


def check_notices_wait() -> None:
    """Host 0 fills the line; then host 1 says that it is ready, which waits behind what may queue before the line."""
    wires = Wires(sites("wwee", RATE / 4), window_bytes=inf)
    idle = wires.notice(1, 2, 0.0)
    begin, left = wires.depart(0, 2, BYTES, 0.0)
    wires.cross(0, 2, BYTES, begin, left)
    queued = 8 * ETHERNET.queue_bytes / (RATE / 4)
    assert wires.notice(1, 2, 0.0) == pytest.approx(idle + queued)
    assert wires.notice(3, 0, 0.0) == pytest.approx(idle)
    assert wires.notice(1, 2, 9.0) == pytest.approx(idle + 9.0)


def test_notices_wait_before_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    check_notices_wait()
    monkeypatch.setattr(SharedLine, "free_at", lambda line, now: now)
    with pytest.raises(AssertionError):
        check_notices_wait()


def test_envelopes_are_what_the_figures_above_take_them_for() -> None:
    assert ETHERNET.wire_bytes(BYTES + ENVELOPE_BYTES) > ETHERNET.wire_bytes(BYTES + EAGER_ENVELOPE_BYTES) == RATE / 8


# -- what it means for collectives -------------------------------------------------------------------------------------


def check_nodes_pay(network: Network) -> None:
    """By what crosses each way: of N bytes N by nodes, 3/2 N around a ring, 2 N straight; 4 workers, 2 on each side."""
    ring, straight, halving, nodes, _ = (table_seconds(each, 20_000_000, 4, network) for each in COLLECTIVES)
    assert ring / nodes == pytest.approx(3 / 2, rel=0.03)
    assert straight / nodes == pytest.approx(2, rel=0.03)
    assert halving / nodes == pytest.approx(1, rel=0.03)  # halves cross the line as seldom, with four


def without_shared_lines(network: Network) -> Network:
    paths = {ends: Path(round_trip_seconds=path.round_trip_seconds) for ends, path in network.paths.items()}
    return Network(hosts=network.hosts, paths=paths)


def test_nodes_pay_where_sites_share_a_line() -> None:
    network = read_network(TWO_OFFICES, 4)
    check_nodes_pay(network)
    with pytest.raises(AssertionError):
        check_nodes_pay(without_shared_lines(network))


def test_the_choice_sees_the_line() -> None:
    network = read_network(TWO_OFFICES, 8)
    assert network.bits_per_second(0, 1) == 1e9
    assert network.bits_per_second(0, 2) == network.bits_per_second(2, 0) == 100e6
    straight_or_not = DirectAllReduce(), TreeAllReduce()
    assert fastest(4_000_000, 4, without_shared_lines(network), straight_or_not) == DirectAllReduce()
    assert fastest(4_000_000, 4, network, straight_or_not) == TreeAllReduce()
