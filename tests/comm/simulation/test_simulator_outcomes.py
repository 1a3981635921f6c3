"""Outcomes of a simulation: exactly-once counting, determinism by seed, deadlocks, refused ops, bytes and events."""

from __future__ import annotations

import pytest
import torch
from support.simulated_peers import HALF, ONE, SERVER, TWO, count, idle, over, push, saying, server

from gossamer.base.ops import AllReduceMean
from gossamer.base.peer_ops import Arrived, Await, Peer, PeerScript, Pull, Receipt, Reply
from gossamer.comm.simulation import compute, simulate_peers
from gossamer.comm.simulation.faulty_network import Kill, Pause, Restart, VirtualNetwork
from gossamer.errors import MismatchError


def check_exactly_once(once: bool) -> None:
    resent = duplicated = 0
    for seed in range(300):
        total, trace = count(seed, once)
        assert total == 24, f"seed {seed}"
        resent, duplicated = resent + trace.resent, duplicated + trace.duplicated
    assert resent > 300
    assert duplicated > 300


def test_a_server_that_remembers_counts_everything_once() -> None:
    check_exactly_once(True)


def test_a_server_that_forgets_counts_wrong() -> None:
    with pytest.raises(AssertionError, match="seed"):
        check_exactly_once(False)


def test_the_same_seed_gives_the_same_conversation_and_others_give_others() -> None:
    events = [count(seed, True)[1].events for seed in range(20)]
    assert events == [count(seed, True)[1].events for seed in range(20)]
    net = VirtualNetwork(jitter_seconds=0.1, loss=0.1)
    traces = {simulate_peers({SERVER: server(), ONE: saying(*[push()] * 5)}, net, seed).seconds for seed in range(50)}
    assert len(traces) == 50
    scripts = {SERVER: server(), ONE: saying(*[push()] * 5)}
    assert simulate_peers(scripts, net, 3).seconds == simulate_peers(scripts, net, 3, checks=True, keep=True).seconds


def test_a_conversation_that_is_stuck_says_who_waits_for_what() -> None:
    def deaf() -> PeerScript:
        while True:
            yield Await()

    pull = Pull(of=SERVER, key="w", known=3, at_least=4)
    with pytest.raises(AssertionError) as stuck:
        simulate_peers({SERVER: deaf, ONE: saying(pull), TWO: deaf}, over(), 0)
    assert str(stuck.value) == (
        "no event is left at 0.25 virtual seconds, and not all scripts have ended: server 0 waits for an event; "
        "worker 0 waits for the answer to the pull of 'w' (known 3, at_least 4) of worker 0 to server 0; "
        "worker 1 waits for an event. Pass peers that only answer as simulate_peers(..., servers=...)."
    )


def test_a_word_to_who_has_gone_for_ever_is_stuck_with_the_cause() -> None:
    def failing() -> PeerScript:
        yield from compute(0.125)
        raise MismatchError("not alike")

    with pytest.raises(AssertionError, match=r"server 0 ended with MismatchError.* at 0.125") as stuck:
        simulate_peers({SERVER: failing, ONE: saying(push())}, over(), 0)
    assert isinstance(stuck.value.__cause__, MismatchError)
    with pytest.raises(AssertionError, match="server 0 was killed at 1"):
        simulate_peers({SERVER: server(), ONE: saying(push(), Await(until=2), push())}, over([Kill(SERVER, 1)]), 0)


def test_a_conversation_without_end_is_stopped() -> None:
    def chatter() -> PeerScript:
        while True:
            yield Await(until=float("-inf"))

    def ticking() -> PeerScript:
        while True:
            yield from compute(1.0)

    with pytest.raises(AssertionError, match="number of ops"):
        simulate_peers({ONE: chatter}, over(), 0, most_words=1000)
    with pytest.raises(AssertionError, match="100 virtual seconds have passed"):
        simulate_peers({ONE: ticking}, over(), 0, most_seconds=100)


def test_wrong_words_are_refused_with_the_seed() -> None:
    def twice() -> PeerScript:
        heard = yield Await()
        while not isinstance(heard, Arrived):
            heard = yield Await()
        yield Reply(token=heard.token, answer=Receipt(version=0))
        yield Reply(token=heard.token, answer=Receipt(version=0))

    with pytest.raises(ValueError, match=r"server 0 replied to token 1, .* has already used"):
        simulate_peers({SERVER: twice, ONE: saying(push())}, over(), 0)
    with pytest.raises(ValueError, match=r"server 0 has no script.* Peers with scripts: worker 0\."):
        simulate_peers({ONE: saying(push())}, over(), 0)
    with pytest.raises(ValueError, match="worker 1 has no script"):
        simulate_peers({ONE: idle(1)}, over([Restart(TWO, 1)]), 0)
    with pytest.raises(TypeError, match="not an op") as refused:
        simulate_peers({ONE: saying(AllReduceMean(torch.zeros(1)))}, over(), 17)
    assert refused.value.__notes__[0].startswith(
        "It was in simulate_peers(..., seed=17), at 0.0 virtual seconds, after an op of worker 0"
    )


def test_a_script_that_speaks_when_it_is_closed_is_refused() -> None:
    def stubborn() -> PeerScript:
        while True:
            try:
                yield Await()
            except GeneratorExit:
                yield Await()

    with pytest.raises(RuntimeError, match="after it was closed"):
        simulate_peers({SERVER: stubborn, ONE: idle(1.0)}, over(), 0)


def test_faults_to_who_has_ended_change_nothing() -> None:
    faults = (Kill(ONE, 2), Restart(ONE, 3), Pause(ONE, 3, 1), Restart(TWO, 1), Kill(ONE, 4))
    trace = simulate_peers({ONE: idle(1.0), TWO: idle(5.0)}, over(faults), 0)
    assert [(ended.moment, ended.killed) for ended in trace.ended.values()] == [(1.0, False), (5.0, False)]


def test_bytes_through_machines() -> None:
    beside = Peer("server", 1)
    ops = (push(), push(to=beside), Pull(of=beside, key="w"))
    trace = simulate_peers({SERVER: server(), beside: server(), ONE: saying(), TWO: saying(*ops)}, HALF, 0)
    assert trace.bytes_through() == {SERVER: 16, beside: 24, TWO: 40}
    assert trace.bytes_through(lambda peer: peer.number) == {0: 16, 1: 16}
    assert max(trace.bytes_through().values()) == 40


def test_events_are_told_in_words() -> None:
    trace = simulate_peers({SERVER: server(), ONE: saying(push(3))}, over([Pause(SERVER, 1, 1)]), 0, keep=True)
    assert trace.events == (
        (0.0, "the push of 'w' (step 3) of worker 0 to server 0 leaves"),
        (0.25, "the push of 'w' (step 3) of worker 0 to server 0 arrives"),
        (0.25, "the answer to the push of 'w' (step 3) of worker 0 to server 0 leaves"),
        (0.5, "the answer to the push of 'w' (step 3) of worker 0 to server 0 arrives"),
        (0.5, "worker 0 ended at 0.5"),
    )
