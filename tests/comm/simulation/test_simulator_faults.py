"""Kills, restarts, cuts and pauses in virtual time. Every rule of them is also broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.simulated_peers import (
    ONE,
    SERVER,
    TWO,
    Twin,
    arrivals,
    comings,
    expect_noticed,
    fates,
    idle,
    line,
    moments,
    nothing,
    over,
    push,
    saying,
    server,
)

from gossamer.base.peer_ops import Arrived, Await, Peer, PeerScript, Receipt, Reply
from gossamer.comm.simulation import compute, simulate_peers
from gossamer.comm.simulation import simulator as simulator_module
from gossamer.comm.simulation.faulty_network import Cut, Fault, Kill, Pause, Restart, VirtualNetwork
from gossamer.comm.simulation.simulator import Delivery, Membership
from gossamer.errors import MismatchError


def check_a_killed_peer_leaves_and_joins() -> None:
    log: list[Any] = []
    faults = (Kill(ONE, 2.0), Restart(ONE, 10.0))
    trace = simulate_peers({SERVER: server(log), ONE: idle(6.0)}, over(faults), 0)
    assert comings(log) == [(0.25, "PeerJoined", ONE), (7.0, "PeerLeft", ONE), (10.25, "PeerJoined", ONE)]
    assert trace.ended[ONE].moment == 16.0


def check_a_quick_restart_is_no_leaving() -> None:
    log: list[Any] = []
    faults = (Kill(ONE, 2.0), Restart(ONE, 3.0), Kill(ONE, 20.0))
    trace = simulate_peers({SERVER: server(log), ONE: idle(60.0), TWO: idle(30.0)}, over(faults), 0)
    of_one = [entry for entry in comings(log) if entry[2] == ONE]
    assert of_one == [(0.25, "PeerJoined", ONE), (3.25, "PeerJoined", ONE), (25.0, "PeerLeft", ONE)]
    assert (trace.ended[ONE].killed, trace.ended[ONE].moment, trace.seconds) == (True, 20.0, 30.0)


def check_who_starts_again_hears_who_is_there() -> None:
    log: list[Any] = []
    faults = (Kill(SERVER, 2.0), Kill(TWO, 3.0), Restart(SERVER, 4.0))
    simulate_peers({SERVER: server(log), ONE: idle(20.0), TWO: idle(20.0)}, over(faults), 0)
    assert comings(log) == [(0.25, "PeerJoined", ONE), (0.25, "PeerJoined", TWO), (4.25, "PeerJoined", ONE)]


def check_who_ends_says_goodbye_and_who_fails_does_not() -> None:
    def failing() -> PeerScript:
        yield from compute(2.0)
        raise MismatchError("not alike")

    log: list[Any] = []
    trace = simulate_peers({SERVER: server(log), ONE: idle(1.0), TWO: failing, Peer("worker", 2): idle(9.0)}, over(), 0)
    assert comings(log)[3:] == [(1.25, "PeerLeft", ONE), (7.0, "PeerLeft", TWO)]
    with pytest.raises(MismatchError, match="not alike"):
        trace.result(TWO)


def check_what_was_not_sent_dies_with_its_sender() -> None:
    """16 bytes take 2 seconds to leave and 10 to arrive: killed after 1 none arrives, after 5 half do."""

    def heard(seconds: float) -> int:
        log: list[Any] = []
        net = over([Kill(ONE, 12.0 + seconds)], round_trip_seconds=20.0, bits_per_second=64.0, dead_after_seconds=20.0)
        for seed in range(100):
            simulate_peers({SERVER: server(log), ONE: saying(12.0, push()), TWO: idle(30.0)}, net, seed)
        return len(arrivals(log))

    assert heard(1.0) == 0
    assert abs(heard(5.0) - 50) < 4.5 * 5


def check_a_request_arrives_only_while_its_sender_is_present() -> None:
    """One that arrives after PeerLeft, or without PeerJoined, would add a killed worker to a server again."""

    def heard(fault: Fault, seconds: float, seed: int = 0) -> list[Any]:
        log: list[Any] = []
        with fates((seconds,)):
            scripts = {SERVER: server(log), ONE: saying(push()), TWO: idle(30.0)}
            simulate_peers(scripts, over([fault], dead_after_seconds=2.0), seed)
        return [entry[:2] for entry in log if entry[2] == ONE]

    for seed in range(10):
        assert heard(Kill(ONE, 1.0), 9.0, seed) == [(0.25, "PeerJoined"), (3.0, "PeerLeft")]
        assert heard(Kill(ONE, 0.125), 0.25, seed) == []
    paused = heard(Pause(ONE, 1.0, 11.0), 9.0)
    assert paused[:4] == [(0.25, "PeerJoined"), (3.0, "PeerLeft"), (12.25, "PeerJoined"), (14.0, "Arrived")]


def check_what_a_killed_server_held_is_said_again() -> None:
    log: list[Any] = []

    def patient() -> PeerScript:
        """Answers nothing before moment 8."""
        while True:
            heard = yield Await()
            log.append(line(heard))
            if isinstance(heard, Arrived) and heard.moment > 8:
                yield Reply(token=heard.token, answer=Receipt(version=1))

    faults = (Kill(SERVER, 2.0), Restart(SERVER, 10.0))
    trace = simulate_peers({SERVER: patient, ONE: saying(push())}, over(faults, resend_seconds=1.5), 0)
    assert arrivals(log) == [(0.25, ONE, 0), (11.75, ONE, 0)]
    assert moments(trace) == [12.0]
    assert (trace.resent, trace.messages) == (1, 3)


def check_words_do_not_reach_the_next_life() -> None:
    """The connection they were sent over has ended."""
    log: list[Any] = []
    faults = (Kill(SERVER, 0.5), Restart(SERVER, 1.0))
    with fates((2.0,)):
        net = VirtualNetwork(resend_seconds=4.0, faults=faults)
        trace = simulate_peers({SERVER: server(log), ONE: saying(push())}, net, 0)
    assert arrivals(log) == [(5.0, ONE, 0)]
    assert moments(trace) == [6.0]


def check_answers_do_not_reach_the_next_life() -> None:
    """Killed while its answer travels and started again: the new incarnation asks anew."""
    log: list[Any] = []
    with fates((1.0,), (9.0,), (1.0,), (1.0,)):
        faults = (Kill(ONE, 2.0), Restart(ONE, 3.0))
        trace = simulate_peers({SERVER: server(log), ONE: saying(push())}, VirtualNetwork(faults=faults), 0)
    assert arrivals(log) == [(1.0, ONE, 0), (4.0, ONE, 0)]
    assert moments(trace) == [5.0]


def check_cuts() -> None:
    """What arrives in a cut is lost; what is said in one waits for its end."""
    log: list[Any] = []
    faults = [Cut((ONE, TWO), (SERVER,), at=0.625, heal_at=8.0)]
    scripts = {SERVER: server(log), ONE: saying(push(0), push(1), push(2), 10.0), TWO: saying(4.0, push(3), 20.0)}
    trace = simulate_peers(scripts, over(faults, resend_seconds=2.0), 0)
    assert arrivals(log) == [(0.25, ONE, 0), (10.25, ONE, 1), (10.25, TWO, 3), (10.75, ONE, 2)]
    of_one = [entry for entry in comings(log) if entry[2] == ONE]
    assert of_one == [
        (0.25, "PeerJoined", ONE),
        (5.625, "PeerLeft", ONE),
        (8.25, "PeerJoined", ONE),
        (21.25, "PeerLeft", ONE),
    ]
    assert (trace.lost, trace.resent) == (1, 2)


def check_cuts_of_one_way() -> None:
    """The ask arrives, its answer does not; only the asker misses the other."""
    log: list[Any] = []

    def script() -> PeerScript:
        answer = yield push()
        first = line((yield Await(until=float("-inf"))))
        return answer, first, line((yield Await(until=float("-inf"))))

    faults = [Cut((SERVER,), (ONE,), at=0.0, heal_at=8.0, one_way=True)]
    trace = simulate_peers({SERVER: server(log), ONE: script}, over(faults), 0)
    assert [entry[:2] for entry in log] == [(0.25, "PeerJoined"), (0.25, "Arrived"), (9.25, "Arrived")]
    assert trace.result(ONE) == (Receipt(version=7), (9.5, "PeerJoined", SERVER), (9.5, "Elapsed"))


def check_a_stopped_server_hears_later() -> None:
    log: list[Any] = []
    trace = simulate_peers({SERVER: server(log), ONE: saying(push(0), push(1))}, over([Pause(SERVER, 0.5, 3.5)]), 0)
    assert arrivals(log) == [(0.25, ONE, 0), (4.0, ONE, 1)]
    assert moments(trace) == [0.5, 4.25]
    assert (trace.lost, trace.resent) == (0, 0)


def check_a_long_stop_counts_as_leaving() -> None:
    log: list[Any] = []
    faults = [Pause(ONE, 1.0, 1.5), Pause(ONE, 4.0, 3.0), Pause(ONE, 5.0, 1.0)]
    ops = (Await(until=0.75), Await(until=1.5), Await(until=5.0), Await(until=8.0))
    trace = simulate_peers({SERVER: server(log), ONE: saying(*ops)}, over(faults, dead_after_seconds=2.0), 0)
    assert comings(log) == [(0.25, "PeerJoined", ONE), (6.0, "PeerLeft", ONE), (7.25, "PeerJoined", ONE)]
    assert [line(answer) for _, answer in trace.result(ONE)] == [
        (0.25, "PeerJoined", SERVER),
        (2.5, "Elapsed"),
        (7.0, "Elapsed"),
        (8.0, "Elapsed"),
    ]


SIMULATION = simulator_module._Simulation
TWINS: list[Twin] = [
    (Delivery, "ask_again", nothing, check_what_a_killed_server_held_is_said_again),
    (Delivery, "retry", nothing, check_cuts),
    (Delivery, "_is_lost", lambda *_: False, check_what_was_not_sent_dies_with_its_sender),
    (Delivery, "_is_lost", lambda *_: False, check_a_request_arrives_only_while_its_sender_is_present),
    (Delivery, "_is_lost", lambda *_: False, check_words_do_not_reach_the_next_life),
    (Membership, "_leave", nothing, check_a_killed_peer_leaves_and_joins),
    (Membership, "_leave", nothing, check_a_long_stop_counts_as_leaving),
    (Membership, "announce", nothing, check_a_quick_restart_is_no_leaving),
    (Membership, "introduce", nothing, check_who_starts_again_hears_who_is_there),
    (Membership, "leave", Membership.check_all_paths, check_who_ends_says_goodbye_and_who_fails_does_not),
    (Cut, "paths", (), check_cuts),
    (Cut, "paths", ((ONE, SERVER), (SERVER, ONE)), check_cuts_of_one_way),
    (SIMULATION, "pause", nothing, check_a_stopped_server_hears_later),
    (SIMULATION, "restart", nothing, check_answers_do_not_reach_the_next_life),
]
CHECKS = [check for name, check in list(globals().items()) if name.startswith("check_")]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_rules(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("twin", TWINS)
def test_rules_are_noticed_when_they_are_broken(twin: Twin) -> None:
    expect_noticed(*twin)


def test_every_rule_is_broken_once() -> None:
    assert {twin[-1] for twin in TWINS} == set(CHECKS)
