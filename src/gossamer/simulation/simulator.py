"""Scripts speak until they have to wait, hear, and speak again; faults happen to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from math import inf
from random import Random
from typing import Any

from gossamer.core.ops import payload_bytes
from gossamer.core.peer_ops import SERVER, Ask, AtOnce, Await, Peer, PeerEvent, PeerOp, PeerScript, Pull, Push, Reply
from gossamer.core.rng import address
from gossamer.errors import GossamerError
from gossamer.simulation.actors import (
    READY,
    UNSEALED,
    Actor,
    Asking,
    Listening,
    MessagePath,
    PendingAsk,
    Turn,
    payload_of,
    receiver_of,
    seal,
)
from gossamer.simulation.clock import VirtualClock
from gossamer.simulation.delivery import Delivery
from gossamer.simulation.faulty_network import MessageTarget, Restart, VirtualNetwork
from gossamer.simulation.membership import Membership
from gossamer.simulation.trace import Diary, Ended, Trace

Scripts = Mapping[Peer, Callable[[], PeerScript]]


def compute(seconds: float) -> Generator[PeerOp, Any, float]:
    """Be busy for so long; returns the clock's moment afterwards. What is heard meanwhile is forgotten.

    Awaiting a moment that has passed tells what the clock shows, without waiting.
    """
    heard: PeerEvent = yield Await(until=-inf)
    until = heard.moment + seconds
    while heard.moment < until:
        heard = yield Await(until=until)
    return heard.moment


def simulate_peers(
    scripts: Scripts,
    net: VirtualNetwork,
    seed: int,
    *,
    servers: Collection[Peer] | None = None,
    keep: bool = False,
    checks: bool = False,
    most_words: int = 1_000_000,
    most_seconds: float = inf,
) -> Trace:
    """Start every peer's script at moment 0 and run them until all but the servers have ended.

    scripts: called for a script at the start, and again when a fault restarts the peer.
    servers: who only answers (None: peers of that kind). At the end their scripts are closed; one that catches
    GeneratorExit may still return a result. A kill closes a script likewise, and ignores what it returns.
    keep: remember what happened. checks: raise AssertionError where somebody wrote to a payload under way.
    Raises AssertionError, naming who waits for what, where nothing can happen any more, after `most_words`, and after
    `most_seconds` of virtual time. A GossamerError ends its script and is kept; any other error ends everything. What
    is raised carries a note with the seed.
    """
    if servers is None:
        servers = [peer for peer in scripts if peer.kind == SERVER]
    conversation = _Conversation(scripts, net, seed, servers, keep, checks)
    try:
        return conversation.run(most_words, most_seconds)
    except Exception as error:
        error.add_note(f"It was in converse(..., seed={seed}), {conversation.where()}, over {net}.")
        raise


class _Conversation(MessageTarget):
    """Everyone in it, and the clock. Faults happen to it."""

    def __init__(
        self, scripts: Scripts, net: VirtualNetwork, seed: int, servers: Collection[Peer], keep: bool, checks: bool
    ) -> None:
        self._net, self._servers, self._checks = net, servers, checks
        self._actors = {
            peer: Actor(peer, start, {to: MessagePath(net.link(peer, to)) for to in scripts}, READY)
            for peer, start in scripts.items()
        }
        self._everyone = tuple(self._actors.values())
        self._clock = VirtualClock()
        self._diary = Diary(self._clock, keep)
        self._post = Delivery(net, Random(address("converse", seed)), self._clock, self._diary, checks, self._go_on)
        self._presence = Membership(self._everyone, net.dead_after_seconds, self._clock, self._go_on)
        self._words_left = 0
        self._speaker: Peer | str = "nobody"
        self._unfinished = sum(peer not in servers for peer in scripts)

    def run(self, most_words: int, most_seconds: float) -> Trace:
        self._words_left = most_words
        self._expect_faults()
        for actor in self._everyone:
            actor.script = actor.start()
            self._clock.at(0.0, self._begin, actor)
        while self._unfinished:
            if not self._clock.tick():
                raise self._stuck("nothing can happen any more")
            if self._clock.now > most_seconds:
                raise self._stuck(f"{most_seconds} virtual seconds have passed")
        for actor in self._everyone:
            if actor.script is not None:
                actor.ended = Ended(moment=self._clock.now, result=_close(actor.script))
        return self._trace()

    def where(self) -> str:
        return f"at {self._clock.now} virtual seconds, when {self._speaker} spoke last"

    def _trace(self) -> Trace:
        ways = [(actor.peer, to, way) for actor in self._everyone for to, way in actor.ways.items()]
        return Trace(
            seconds=self._clock.now,
            ended={actor.peer: actor.ended for actor in self._everyone if actor.ended is not None},
            sent_bytes={(sender, to): way.sent_bytes for sender, to, way in ways if way.sent_bytes},
            received_bytes={(sender, to): way.received_bytes for sender, to, way in ways if way.received_bytes},
            messages=self._diary.messages,
            resent=self._diary.resent,
            lost=self._diary.lost,
            duplicated=self._diary.duplicated,
            events=tuple(self._diary.events),
        )

    def _stuck(self, why: str) -> AssertionError:
        waits = [f"{actor.peer} waits {actor.waits}" for actor in self._everyone if actor.script is not None]
        gone = [f"{actor.peer} {actor.ended}" for actor in self._everyone if actor.ended is not None]
        stuck = AssertionError(
            f"{why} at {self._clock.now} virtual seconds, and not all scripts have ended: {'; '.join(waits + gone)}. "
            "Who only answers is named in converse(..., servers=...)."
        )
        errors = (actor.ended.error for actor in self._everyone if actor.ended is not None)
        stuck.__cause__ = next((error for error in errors if error is not None), None)
        return stuck

    # Scripts.

    def _begin(self, actor: Actor) -> None:
        self._presence.announce(actor)
        self._go_on(actor)

    def _go_on(self, actor: Actor) -> None:
        """Let a script speak until it has to wait."""
        while actor.script is not None and actor.paused_until is None:
            turn = actor.waits.turn(actor, actor.script, self._clock.now)
            if turn is None:
                return
            self._words_left, self._speaker = self._words_left - 1, actor.peer
            if self._words_left < 0:
                raise self._stuck("too many words have been said")
            self._speak(actor, turn)

    def _speak(self, actor: Actor, turn: Turn) -> None:
        resume, heard = turn
        try:
            op = resume(heard)
        except StopIteration as stop:
            self._end(actor, Ended(moment=self._clock.now, result=stop.value))
        except GossamerError as error:
            self._end(actor, Ended(moment=self._clock.now, error=error))
        else:
            self._say(actor, op)

    def _end(self, actor: Actor, ended: Ended) -> None:
        self._diary.note(actor.peer, ended)
        actor.script, actor.ended = None, ended
        self._unfinished -= actor.peer not in self._servers
        if ended.error is None:
            self._presence.say_goodbye(actor)
        else:
            self._presence.review_all(actor)

    # Words.

    def _say(self, actor: Actor, op: PeerOp) -> None:
        match op:
            case Push() | Pull():
                self._ask(actor, (op,), alone=True)
            case AtOnce(ops):
                self._ask(actor, ops, alone=False)
            case Await(until=until):
                actor.waits = Listening(until)
                if until is not None and until > self._clock.now:
                    self._clock.at(until, self._go_on, actor)
            case Reply(token=token, answer=answer):
                actor.waits = READY
                self._post.reply(actor, token, answer)
            case _:
                raise TypeError(f"{actor.peer} said {op!r}, which is no word of peers that do not move in step")

    def _ask(self, actor: Actor, ops: Sequence[Ask], alone: bool) -> None:
        asked = tuple(self._asked(actor, op) for op in ops)
        patience = min((op.within_seconds for op in ops if op.within_seconds is not None), default=inf)
        actor.waits = Asking(asked, alone, self._clock.now + patience)
        if patience < inf:
            self._clock.later(patience, self._go_on, actor)
        for each in asked:
            self._post.ask(each)

    def _asked(self, actor: Actor, op: Ask) -> PendingAsk:
        payload, receiver = payload_of(op), self._actor(receiver_of(op))
        sealed = seal(payload) if self._checks else UNSEALED
        return PendingAsk(op, actor, actor.life, receiver, payload_bytes(payload), self._clock.now, sealed)

    def _actor(self, peer: Peer) -> Actor:
        if peer not in self._actors:
            raise ValueError(
                f"{peer} has no script, so nobody could answer it or suffer a fault in its place. There are: "
                f"{', '.join(map(str, self._actors))}."
            )
        return self._actors[peer]

    # Faults.

    def _expect_faults(self) -> None:
        for fault in self._net.faults:
            for moment, happen in fault.happenings():
                self._clock.at(moment, self._strike, happen)
            if isinstance(fault, Restart):
                self._actor(fault.peer).restarts += 1

    def _strike(self, happen: Callable[[MessageTarget], None]) -> None:
        happen(self)
        self._post.retry()

    def kill(self, peer: Peer) -> None:
        actor = self._actor(peer)
        if actor.script is None:
            return
        self._diary.note(peer, "is killed")
        _close(actor.script)
        for asked in actor.waits.asked:
            asked.over = True
        actor.die(self._clock.now)
        self._unfinished -= peer not in self._servers and not actor.restarts
        self._presence.review_all(actor)
        for asked in [asked for other in self._everyone for asked in other.waits.asked if asked.receiver is actor]:
            self._post.ask_again(asked)

    def restart(self, peer: Peer) -> None:
        actor = self._actor(peer)
        actor.restarts -= 1
        if actor.ended is not None and actor.ended.killed:
            self._diary.note(peer, "is started again")
            actor.script, actor.ended = actor.start(), None
            self._presence.learn(actor)
            self._begin(actor)

    def pause(self, peer: Peer, until: float) -> None:
        actor = self._actor(peer)
        if actor.script is not None:
            self._diary.note(peer, "stops until", until)
            actor.paused_until = max(until, actor.paused_until or until)
            self._presence.review_all(actor)

    def resume(self, peer: Peer) -> None:
        actor = self._actor(peer)
        if actor.paused_until is not None and actor.paused_until <= self._clock.now:
            self._diary.note(peer, "goes on")
            actor.paused_until = None
            self._presence.review_all(actor)
            self._go_on(actor)

    def cut(self, ways: Iterable[tuple[Peer, Peer]]) -> None:
        self._change(ways, 1, "is cut off from")

    def heal(self, ways: Iterable[tuple[Peer, Peer]]) -> None:
        self._change(ways, -1, "is heard again by")

    def _change(self, ways: Iterable[tuple[Peer, Peer]], cuts: int, what: str) -> None:
        for sender, receiver in ways:
            actor, other = self._actor(sender), self._actor(receiver)
            actor.ways[receiver].cuts += cuts
            self._diary.note(sender, what, receiver)
            self._presence.review(actor, other)


def _close(script: PeerScript) -> Any:
    """Let a script end where it waits; what it returns then."""
    try:
        script.throw(GeneratorExit())
    except StopIteration as stop:
        return stop.value
    except GeneratorExit:
        return None
    raise RuntimeError(f"{script} went on speaking when it was closed: let GeneratorExit pass, or return")
