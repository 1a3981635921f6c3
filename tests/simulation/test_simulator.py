"""Conversations in virtual time, against literal moments. Every rule of the simulation is also broken on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gossamer.core.ops import AllReduceMean
from gossamer.core.peer_ops import (
    Answer,
    Arrived,
    AtOnce,
    Await,
    Elapsed,
    Peer,
    PeerEvent,
    PeerJoined,
    PeerLeft,
    PeerScript,
    Pull,
    Pulled,
    Push,
    Receipt,
    Reply,
    Stamp,
)
from gossamer.errors import MismatchError, PeerLost
from gossamer.simulation import Trace, compute, simulate_peers
from gossamer.simulation import simulator as conversation_module
from gossamer.simulation.actors import Actor, Asking, Listening, PendingAsk, QueuedMessage, Turn
from gossamer.simulation.delivery import Delivery
from gossamer.simulation.faulty_network import Cut, Fault, Kill, Link, Pause, Restart, VirtualNetwork
from gossamer.simulation.membership import Membership

SERVER, ONE, TWO = Peer("server", 0), Peer("worker", 0), Peer("worker", 1)
HALF = VirtualNetwork(round_trip_seconds=0.5, bits_per_second=64.0)
FOUR, TWO_NUMBERS = (torch.arange(4.0),), (torch.arange(2.0),)


def push(step: int = 0, to: Peer = SERVER, within_seconds: float | None = None) -> Push:
    return Push(to=to, key="w", stamp=Stamp(0, step), payload=FOUR, within_seconds=within_seconds)


def answer_to(op: Push | Pull) -> Answer:
    return Receipt(version=7) if isinstance(op, Push) else Pulled(version=7, payload=TWO_NUMBERS)


def server(log: list[Any] | None = None) -> Callable[[], PeerScript]:
    """Answers everything at once, and writes down whom it heard when."""
    log = [] if log is None else log

    def script() -> PeerScript:
        while True:
            heard = yield Await()
            log.append(line(heard))
            if isinstance(heard, Arrived):
                yield Reply(token=heard.token, answer=answer_to(heard.op))

    return script


def line(heard: PeerEvent) -> tuple[Any, ...]:
    """(moment, "PeerJoined" | "PeerLeft", peer), (moment, "Elapsed") or (moment, "Arrived", sender, step)."""
    match heard:
        case Arrived(sender=sender, op=Push(stamp=stamp)):
            return heard.moment, "Arrived", sender, stamp.step
        case PeerJoined(peer=peer) | PeerLeft(peer=peer):
            return heard.moment, type(heard).__name__, peer
    return heard.moment, type(heard).__name__


def arrivals(log: list[Any]) -> list[Any]:
    return [(entry[0], *entry[2:]) for entry in log if entry[1] == "Arrived"]


def comings(log: list[Any]) -> list[Any]:
    return [entry for entry in log if entry[1] in ("PeerJoined", "PeerLeft")]


def saying(*ops: Any) -> Callable[[], PeerScript]:
    """Says one after the other, or computes for so many seconds; returns (moment, answer) of each word."""

    def script() -> PeerScript:
        heard = []
        for op in ops:
            if isinstance(op, float):
                yield from compute(op)
            else:
                answer = yield op
                heard.append(((yield from compute(0)), answer))
        return heard

    return script


def idle(seconds: float) -> Callable[[], PeerScript]:
    return lambda: compute(seconds)


def moments(trace: Trace, peer: Peer = ONE) -> list[float]:
    return [moment for moment, _ in trace.result(peer)]


def over(faults: Iterable[Fault] = (), **fields: Any) -> VirtualNetwork:
    return VirtualNetwork(**({"round_trip_seconds": 0.5, "faults": tuple(faults)} | fields))


def fates(*seconds: tuple[float, ...]) -> Any:
    """What becomes of the messages, in the order in which they leave; the later ones arrive after a second."""
    left = iter(seconds)
    return patch.object(Link, "travels", lambda *_: next(left, (1.0,)))


# What a word takes.


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
    """The word comes twice with identical bytes, and the asker hears one answer."""
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


# Patience.


def check_patience() -> None:
    """Raised at the word, at its moment; the answer that comes later is not heard by the next word."""

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
    assert lost == "nobody answered the push of 'w' (step 1) of worker 0 to server 0 until 1.5"
    assert (answer, moment) == (Receipt(version=7), 22.5)
    assert arrivals(log) == [(1.0, ONE, 1), (21.5, ONE, 2)]


def check_patience_with_several() -> None:
    """The least patient word decides, and all of them are given up: none is said again."""
    ops = AtOnce((push(1, within_seconds=3.0), push(2, within_seconds=2.0), push(3)))
    log: list[Any] = []
    with fates((0.5,), (), (), (0.5,)):
        net = VirtualNetwork(resend_seconds=3.0)
        trace = simulate_peers({SERVER: server(log), ONE: saying(ops), TWO: idle(9.0)}, net, 0)
    assert trace.ended[ONE].moment == 2.0
    assert arrivals(log) == [(0.5, ONE, 1)]
    with pytest.raises(PeerLost, match=r"\(step 2\).*\(step 3\)"):
        trace.result(ONE)


# Waiting.


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


# Coming and going.


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
    """16 bytes take 2 seconds to leave and 10 to arrive: killed at 1 none arrives, at 5 half do."""

    def heard(killed_at: float) -> int:
        log: list[Any] = []
        net = over([Kill(ONE, killed_at)], round_trip_seconds=20.0, bits_per_second=64.0)
        for seed in range(100):
            simulate_peers({SERVER: server(log), ONE: saying(push()), TWO: idle(20.0)}, net, seed)
        return len(arrivals(log))

    assert heard(1.0) == 0
    assert abs(heard(5.0) - 50) < 4.5 * 5


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
    """Killed while its answer travels and started again: the new life says its word anew."""
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
    """The word arrives, its answer does not; only the asker misses the other."""
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


# Payloads under way.


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
        with pytest.raises(AssertionError, match=r"push of 'w' .* was written to while it was under way"):
            simulate_peers(scripts, over(), 0, checks=True)


def check_who_writes_to_an_answer_under_way() -> None:
    scripts = {SERVER: server(), ONE: saying(Pull(of=SERVER, key="w")), TWO: writing(0.375, TWO_NUMBERS[0])}
    with pytest.raises(AssertionError, match=r"the answer to the pull of 'w' .* was written to"):
        simulate_peers(scripts, over(), 0, checks=True)


# Exactly once.


def count(seed: int, once: bool, idle_seconds: float = 0.0) -> tuple[int, Trace]:
    """Three workers push 8 times each over a bad network to a server that counts, and remembers what it counted."""
    counted: dict[Stamp, int] = {}
    done = [0, 0, 0]
    total = 0

    def counter() -> PeerScript:
        nonlocal total
        while True:
            heard = yield Await()
            if isinstance(heard, Arrived):
                assert isinstance(heard.op, Push)
                stamp = heard.op.stamp
                if not once or stamp not in counted:
                    total += int(heard.op.payload[0].sum())
                counted[stamp] = total
                yield Reply(token=heard.token, answer=Receipt(version=total))

    def worker(number: int) -> Callable[[], PeerScript]:
        def script() -> PeerScript:
            while done[number] < 8:
                yield from compute(0.05)
                yield Push(to=SERVER, key="n", stamp=Stamp(number, done[number]), payload=(torch.ones(1),))
                done[number] += 1
            yield from compute(idle_seconds)

        return script

    scripts = {SERVER: counter, **{Peer("worker", number): worker(number) for number in range(3)}}
    trace = simulate_peers(scripts, VirtualNetwork.random(seed, list(scripts), 1.0), seed, keep=True)
    return total, trace


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


def check_whatever_was_sent_arrived_or_was_lost() -> None:
    for seed in range(50):
        _, trace = count(seed, True, idle_seconds=20.0)
        arrived = sum(what.endswith("arrives") for _, what in trace.events)
        assert arrived == trace.messages + trace.duplicated - trace.lost


# How it ends.


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


CHECKS = [
    check for name, check in list(globals().items()) if name.startswith("check_") and name != "check_exactly_once"
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_rules(check: Callable[[], None]) -> None:
    check()


def nothing(*_: Any) -> None:
    return None


def never_gives_up(wait: Asking, actor: Actor, script: PeerScript, now: float) -> Turn | None:
    answers = [asked.answer for asked in wait.asked]
    return None if None in answers else (script.send, answers[0] if wait.alone else answers)


def as_they_come(wait: Asking, actor: Actor, script: PeerScript, now: float) -> Turn | None:
    answers = sorted((asked.answer for asked in wait.asked if asked.answer is not None), key=repr)
    return (script.send, answers[0] if wait.alone else answers) if len(answers) == len(wait.asked) else None


def deaf(wait: Listening, actor: Actor, script: PeerScript, now: float) -> Turn | None:
    return (script.send, Elapsed(moment=now)) if wait.until is not None and wait.until <= now else None


def awaits_once(seconds: float) -> PeerScript:
    heard = yield Await(until=float("-inf"))
    return (yield Await(until=heard.moment + seconds)).moment


def deliver_once(post: Delivery, asked: PendingAsk, receiver: Actor) -> None:
    if not asked.over:
        DELIVER(post, asked, receiver)


DELIVER = Delivery._deliver


def lose_in_silence(post: Delivery, message: QueuedMessage) -> None:
    post.ask_again(message.asked)


TALK = conversation_module._Conversation
TWINS: list[tuple[Any, str, Any, Callable[[], None]]] = [
    (Link, "sending_seconds", lambda *_: 0.0, check_times),
    (Link, "latency_seconds", 0.5, check_times),
    (VirtualNetwork, "link", lambda net, *_: net.default, check_links_of_pairs),
    (Delivery, "ask_again", nothing, check_a_lost_word_is_said_again),
    (Delivery, "ask_again", nothing, check_a_lost_answer_is_given_again),
    (Delivery, "ask_again", nothing, check_an_answer_lost_late_is_given_again_after_the_loss),
    (Delivery, "ask_again", nothing, check_what_a_killed_server_held_is_said_again),
    (Delivery, "_deliver", deliver_once, check_doubles_arrive),
    (Delivery, "_lose", lose_in_silence, check_whatever_was_sent_arrived_or_was_lost),
    (Delivery, "retry", nothing, check_cuts),
    (Delivery, "_gone", lambda *_: False, check_what_was_not_sent_dies_with_its_sender),
    (Delivery, "_gone", lambda *_: False, check_words_do_not_reach_the_next_life),
    (Asking, "turn", as_they_come, check_words_at_once_overtake_each_other),
    (Asking, "turn", never_gives_up, check_patience),
    (Asking, "_give_up", nothing, check_patience_with_several),
    (Listening, "turn", deaf, check_awaiting),
    (check_computing, "__defaults__", (awaits_once,), check_computing),
    (Membership, "_leave", nothing, check_a_killed_peer_leaves_and_joins),
    (Membership, "_leave", nothing, check_a_long_stop_counts_as_leaving),
    (Membership, "announce", nothing, check_a_quick_restart_is_no_leaving),
    (Membership, "learn", nothing, check_who_starts_again_hears_who_is_there),
    (Membership, "say_goodbye", Membership.review_all, check_who_ends_says_goodbye_and_who_fails_does_not),
    (Cut, "ways", (), check_cuts),
    (Cut, "ways", ((ONE, SERVER), (SERVER, ONE)), check_cuts_of_one_way),
    (TALK, "pause", nothing, check_a_stopped_server_hears_later),
    (TALK, "restart", nothing, check_answers_do_not_reach_the_next_life),
    (QueuedMessage, "check", nothing, check_who_writes_to_a_payload_under_way),
    (QueuedMessage, "check", nothing, check_who_writes_to_an_answer_under_way),
    (conversation_module, "_close", nothing, check_servers_end_with_the_workers),
]


@pytest.mark.parametrize(("where", "what", "broken", "check"), TWINS)
def test_rules_are_noticed_when_they_are_broken(where: Any, what: str, broken: Any, check: Callable[[], None]) -> None:
    with patch.object(where, what, broken), pytest.raises((AssertionError, pytest.fail.Exception)):
        check()


def test_every_rule_is_broken_once() -> None:
    assert {twin[-1] for twin in TWINS} == set(CHECKS)


# What is refused.


def test_a_conversation_that_is_stuck_says_who_waits_for_what() -> None:
    def deaf() -> PeerScript:
        while True:
            yield Await()

    pull = Pull(of=SERVER, key="w", known=3, at_least=4)
    with pytest.raises(AssertionError) as stuck:
        simulate_peers({SERVER: deaf, ONE: saying(pull), TWO: deaf}, over(), 0)
    assert str(stuck.value) == (
        "nothing can happen any more at 0.25 virtual seconds, and not all scripts have ended: server 0 waits to hear "
        "something; worker 0 waits for the answer to the pull of 'w' (known 3, at_least 4) of worker 0 to server 0; "
        "worker 1 waits to hear something. Who only answers is named in converse(..., servers=...)."
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

    with pytest.raises(AssertionError, match="too many words"):
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

    with pytest.raises(ValueError, match=r"server 0 replied to token 1, .* has used before"):
        simulate_peers({SERVER: twice, ONE: saying(push())}, over(), 0)
    with pytest.raises(ValueError, match=r"server 0 has no script.* There are: worker 0\."):
        simulate_peers({ONE: saying(push())}, over(), 0)
    with pytest.raises(ValueError, match="worker 1 has no script"):
        simulate_peers({ONE: idle(1)}, over([Restart(TWO, 1)]), 0)
    with pytest.raises(TypeError, match="no word of peers") as refused:
        simulate_peers({ONE: saying(AllReduceMean(torch.zeros(1)))}, over(), 17)
    assert refused.value.__notes__[0].startswith(
        "It was in converse(..., seed=17), at 0.0 virtual seconds, when worker 0"
    )


def test_a_script_that_speaks_when_it_is_closed_is_refused() -> None:
    def stubborn() -> PeerScript:
        while True:
            try:
                yield Await()
            except GeneratorExit:
                yield Await()

    with pytest.raises(RuntimeError, match="went on speaking"):
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
