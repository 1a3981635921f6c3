"""Messages in virtual time, against literal moments. Every rule of the simulation is also broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.simulated_peers import (
    HALF,
    ONE,
    SERVER,
    TWO,
    TWO_NUMBERS,
    Twin,
    arrivals,
    count,
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

from gossamer.base.peer_ops import (
    Arrived,
    AtOnce,
    Await,
    Elapsed,
    Peer,
    PeerScript,
    Pull,
    Pulled,
    Push,
    Receipt,
    Reply,
    Stamp,
)
from gossamer.comm.simulation import compute, simulate_peers
from gossamer.comm.simulation import simulator as simulator_module
from gossamer.comm.simulation.actors import Actor, Asking, Listening, PendingAsk, QueuedMessage, Resumption
from gossamer.comm.simulation.faulty_network import Link, VirtualNetwork
from gossamer.comm.simulation.simulator import Delivery
from gossamer.errors import PeerLost


def check_times() -> None:
    trace = simulate_peers({SERVER: server(), ONE: saying(push(), Pull(of=SERVER, key="w"))}, HALF, 0)
    assert trace.result(ONE) == [(2.5, Receipt(version=7)), (4.0, Pulled(version=7, payload=TWO_NUMBERS))]
    assert trace.seconds == trace.ended[ONE].moment == 4.0
    assert trace.sent_bytes == trace.received_bytes == {(ONE, SERVER): 16, (SERVER, ONE): 8}
    assert (trace.messages, trace.resent, trace.lost, trace.duplicated, trace.events) == (4, 0, 0, 0, ())


def check_a_lost_word_is_said_again() -> None:
    log: list[Any] = []
    with fates((), ()):
        trace = simulate_peers({SERVER: server(log), ONE: saying(push())}, VirtualNetwork(resend_seconds=4.0), 0)
    assert arrivals(log) == [(9.0, ONE, 0)]
    assert moments(trace) == [10.0]
    assert (trace.messages, trace.resent, trace.lost) == (4, 2, 2)
    assert trace.sent_bytes[ONE, SERVER] == 48
    assert trace.received_bytes[ONE, SERVER] == 16


def check_a_lost_answer_is_given_again() -> None:
    """The ask arrives twice with identical bytes, and the asker receives one answer."""
    heard: list[Arrived] = []

    def script() -> PeerScript:
        while True:
            arrived = yield Await()
            if isinstance(arrived, Arrived):
                heard.append(arrived)
                yield Reply(token=arrived.token, answer=Receipt(version=len(heard)))

    with fates((1.0,), ()):
        trace = simulate_peers({SERVER: script, ONE: saying(push())}, VirtualNetwork(resend_seconds=4.0), 0)
    assert [arrived.moment for arrived in heard] == [1.0, 5.0]
    assert heard[0].op is heard[1].op
    assert heard[0].token != heard[1].token
    assert trace.result(ONE) == [(6.0, Receipt(version=2))]


def check_an_answer_lost_late_is_given_again_after_the_loss() -> None:
    with fates((6.0,), ()):
        trace = simulate_peers({SERVER: server(), ONE: saying(push())}, VirtualNetwork(resend_seconds=4.0), 0)
    assert moments(trace) == [6.0 + 4.0 + 2.0]


def check_doubles_arrive() -> None:
    log: list[Any] = []
    with fates((1.0, 3.0)):
        trace = simulate_peers({SERVER: server(log), ONE: saying(push(), Await(until=4.0))}, VirtualNetwork(), 0)
    assert arrivals(log) == [(1.0, ONE, 0), (3.0, ONE, 0)]
    assert moments(trace)[0] == 2.0
    assert (trace.duplicated, trace.messages) == (1, 3)


def check_words_at_once_overtake_each_other() -> None:
    log: list[Any] = []
    ops = AtOnce((push(5), Pull(of=SERVER, key="w"), push(6)))
    with fates((3.0,), (2.0,), (1.0,)):
        trace = simulate_peers({SERVER: server(log), ONE: saying(ops, AtOnce(()))}, VirtualNetwork(), 0)
    assert arrivals(log) == [(1.0, ONE, 6), (2.0,), (3.0, ONE, 5)]
    pulled = Pulled(version=7, payload=TWO_NUMBERS)
    assert trace.result(ONE) == [(4.0, [Receipt(version=7), pulled, Receipt(version=7)]), (4.0, [])]


def check_links_of_pairs() -> None:
    links = {(ONE, SERVER): Link(round_trip_seconds=4.0), (SERVER, ONE): Link(round_trip_seconds=1.0)}
    trace = simulate_peers({SERVER: server(), ONE: saying(push()), TWO: saying(push())}, over(links=links), 0)
    assert (moments(trace), moments(trace, TWO)) == ([2.5], [0.5])


def check_patience() -> None:
    """Raised at the ask, at its moment; an answer that comes later is not taken for the next ask's."""

    def script() -> PeerScript:
        try:
            yield push(1, within_seconds=1.5)
        except PeerLost as lost:
            answer = yield push(2)
            return str(lost), answer, (yield from compute(0))

    log: list[Any] = []
    with fates((1.0,), (9.0,), (20.0,)):
        trace = simulate_peers({SERVER: server(log), ONE: script}, VirtualNetwork(resend_seconds=100), 0)
    assert trace.seconds == 1.5 + 20.0 + 1.0
    lost, answer, moment = trace.result(ONE)
    assert lost == "no answer to the push of 'w' (step 1) of worker 0 to server 0 until 1.5"
    assert (answer, moment) == (Receipt(version=7), 22.5)
    assert arrivals(log) == [(1.0, ONE, 1), (21.5, ONE, 2)]


def check_patience_with_several() -> None:
    """The shortest timeout decides, and all asks are given up: none is resent."""
    ops = AtOnce((push(1, within_seconds=3.0), push(2, within_seconds=2.0), push(3)))
    log: list[Any] = []
    with fates((0.5,), (), (), (0.5,)):
        net = VirtualNetwork(resend_seconds=3.0)
        trace = simulate_peers({SERVER: server(log), ONE: saying(ops), TWO: idle(9.0)}, net, 0)
    assert trace.ended[ONE].moment == 2.0
    assert arrivals(log) == [(0.5, ONE, 1)]
    with pytest.raises(PeerLost, match=r"\(step 2\).*\(step 3\)"):
        trace.result(ONE)


def check_awaiting() -> None:
    """What was heard comes before the time is up; a time that has passed is up at once."""

    def script() -> PeerScript:
        first = line((yield Await(until=0.125)))
        joined = line((yield Await(until=0.5)))
        left = line((yield Await()))
        return first, joined, left, line((yield Await(until=float("-inf"))))

    trace = simulate_peers({ONE: script, TWO: idle(2.0)}, over(), 0)
    assert trace.result(ONE) == (
        (0.125, "Elapsed"),
        (0.25, "PeerJoined", TWO),
        (2.25, "PeerLeft", TWO),
        (2.25, "Elapsed"),
    )


def check_computing(busy: Callable[[float], PeerScript] = compute) -> None:
    """Whoever comes or goes meanwhile does not shorten it."""

    def script() -> PeerScript:
        first = yield from busy(1.5)
        second = yield from busy(2.25)
        return first, second

    trace = simulate_peers({ONE: script, TWO: idle(1.0)}, over(), 0)
    assert trace.result(ONE) == (1.5, 3.75)


def writing(moment: float, tensor: torch.Tensor) -> Callable[[], PeerScript]:
    def script() -> PeerScript:
        yield from compute(moment)
        tensor.add_(1)

    return script


def check_who_writes_to_a_payload_under_way() -> None:
    for moment, written in ((0.125, True), (0.375, True), (0.625, False)):
        tensor = torch.zeros(3, dtype=torch.bfloat16)
        op = Push(to=SERVER, key="w", stamp=Stamp(0, 0), payload=(tensor, torch.zeros(2, device="meta")))
        scripts = {SERVER: server(), ONE: saying(op), TWO: writing(moment, tensor)}
        assert simulate_peers(scripts, over(), 0).ended[ONE].moment == 0.5
        tensor.zero_()
        if not written:
            simulate_peers(scripts, over(), 0, checks=True)
            continue
        with pytest.raises(AssertionError, match=r"push of 'w' .* was modified in transit"):
            simulate_peers(scripts, over(), 0, checks=True)


def check_who_writes_to_an_answer_under_way() -> None:
    scripts = {SERVER: server(), ONE: saying(Pull(of=SERVER, key="w")), TWO: writing(0.375, TWO_NUMBERS[0])}
    with pytest.raises(AssertionError, match=r"the answer to the pull of 'w' .* was modified"):
        simulate_peers(scripts, over(), 0, checks=True)


def check_whatever_was_sent_arrived_or_was_lost() -> None:
    for seed in range(50):
        _, trace = count(seed, True, idle_seconds=20.0)
        arrived = sum(what.endswith("arrives") for _, what in trace.events)
        assert arrived == trace.messages + trace.duplicated - trace.lost


def check_servers_end_with_the_workers() -> None:
    def counting() -> PeerScript:
        heard = 0
        try:
            while True:
                heard += isinstance((yield Await(until=None)), Arrived)
        except GeneratorExit:
            return heard

    def ticking() -> PeerScript:
        while True:
            yield from compute(1.0)

    other, answering = Peer("server", 1), Peer("worker", 9)
    scripts = {SERVER: counting, other: ticking, answering: server(), ONE: saying(push(to=answering), 3.0)}
    trace = simulate_peers(scripts, over(), 0, servers=(SERVER, other, answering))
    assert {peer: ended.moment for peer, ended in trace.ended.items()} == dict.fromkeys(scripts, 3.5)
    assert (trace.result(SERVER), trace.result(other)) == (0, None)
    scripts = {SERVER: counting, ONE: saying(push(within_seconds=2.0))}
    trace = simulate_peers(scripts, over(), 0)
    assert trace.result(SERVER) == 1


def never_gives_up(wait: Asking, actor: Actor, script: PeerScript, now: float) -> Resumption | None:
    answers = [pending.answer for pending in wait.pending]
    return None if None in answers else (script.send, answers[0] if wait.single else answers)


def as_they_come(wait: Asking, actor: Actor, script: PeerScript, now: float) -> Resumption | None:
    answers = sorted((pending.answer for pending in wait.pending if pending.answer is not None), key=repr)
    return (script.send, answers[0] if wait.single else answers) if len(answers) == len(wait.pending) else None


def deaf(wait: Listening, actor: Actor, script: PeerScript, now: float) -> Resumption | None:
    return (script.send, Elapsed(moment=now)) if wait.until is not None and wait.until <= now else None


def awaits_once(seconds: float) -> PeerScript:
    heard = yield Await(until=float("-inf"))
    return (yield Await(until=heard.moment + seconds)).moment


def deliver_once(delivery: Delivery, pending: PendingAsk, receiver: Actor) -> None:
    if not pending.settled:
        DELIVER(delivery, pending, receiver)


DELIVER = Delivery._deliver


def lose_in_silence(delivery: Delivery, message: QueuedMessage) -> None:
    delivery.ask_again(message.pending)


TWINS: list[Twin] = [
    (Link, "sending_seconds", lambda *_: 0.0, check_times),
    (Link, "latency_seconds", 0.5, check_times),
    (VirtualNetwork, "link", lambda net, *_: net.default, check_links_of_pairs),
    (Delivery, "ask_again", nothing, check_a_lost_word_is_said_again),
    (Delivery, "ask_again", nothing, check_a_lost_answer_is_given_again),
    (Delivery, "ask_again", nothing, check_an_answer_lost_late_is_given_again_after_the_loss),
    (Delivery, "_deliver", deliver_once, check_doubles_arrive),
    (Delivery, "_lose", lose_in_silence, check_whatever_was_sent_arrived_or_was_lost),
    (Asking, "resumption", as_they_come, check_words_at_once_overtake_each_other),
    (Asking, "resumption", never_gives_up, check_patience),
    (Asking, "_give_up", nothing, check_patience_with_several),
    (Listening, "resumption", deaf, check_awaiting),
    (check_computing, "__defaults__", (awaits_once,), check_computing),
    (QueuedMessage, "check", nothing, check_who_writes_to_a_payload_under_way),
    (QueuedMessage, "check", nothing, check_who_writes_to_an_answer_under_way),
    (simulator_module, "_close", nothing, check_servers_end_with_the_workers),
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
