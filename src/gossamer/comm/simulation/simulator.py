"""Simulator: resumes peers' scripts in virtual time, delivers their asks and events, and applies faults."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from math import inf
from random import Random
from typing import Any

from gossamer.base.ops import payload_bytes
from gossamer.base.peer_ops import SERVER, Ask, AtOnce, Await, Peer, PeerEvent, PeerOp, PeerScript, Pull, Push, Reply
from gossamer.base.rng import address
from gossamer.base.virtual_clock import VirtualClock
from gossamer.comm.simulation.actors import (
    NO_CHECKSUM,
    READY,
    Actor,
    Asking,
    Listening,
    MessagePath,
    PendingAsk,
    Resumption,
    payload_checksum,
    payload_of,
    receiver_of,
)
from gossamer.comm.simulation.delivery import Delivery
from gossamer.comm.simulation.faulty_network import MessageTarget, Restart, VirtualNetwork
from gossamer.comm.simulation.membership import Membership
from gossamer.comm.simulation.trace import Ended, Trace, TraceWriter
from gossamer.errors import GossamerError

Scripts = Mapping[Peer, Callable[[], PeerScript]]


def compute(seconds: float) -> Generator[PeerOp, Any, float]:
    """Be busy for `seconds`; returns the clock's moment afterwards. Events in between are dropped.

    Awaiting a moment that has passed reads the clock without waiting.
    """
    event: PeerEvent = yield Await(until=-inf)
    until = event.moment + seconds
    while event.moment < until:
        event = yield Await(until=until)
    return event.moment


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
    servers: peers that only answer (None: those of that kind). At the end their scripts are closed; one that catches
    GeneratorExit may still return a result. A kill closes a script likewise, and ignores what it returns.
    keep: record events. checks: raise AssertionError where a payload on its way was written to.
    Raises AssertionError, with what each script waits for, in a deadlock, after `most_words` ops and after
    `most_seconds` of virtual time. A GossamerError ends its script and is kept; any other error ends everything and
    carries a note with the seed.
    """
    if servers is None:
        servers = [peer for peer in scripts if peer.kind == SERVER]
    simulation = _Simulation(scripts, net, seed, servers, keep, checks)
    try:
        return simulation.run(most_words, most_seconds)
    except Exception as error:
        error.add_note(f"It was in converse(..., seed={seed}), {simulation.where()}, over {net}.")
        raise


class _Simulation(MessageTarget):
    """All actors and the clock; the target of faults."""

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
        self._trace_writer = TraceWriter(self._clock, keep)
        random = Random(address("converse", seed))  # this text decides all draws
        self._delivery = Delivery(net, random, self._clock, self._trace_writer, checks, self._advance)
        self._membership = Membership(self._everyone, net.dead_after_seconds, self._clock, self._advance)
        self._ops_left = 0
        self._last_resumed: Peer | str = "nobody"
        self._unfinished = sum(peer not in servers for peer in scripts)

    def run(self, most_words: int, most_seconds: float) -> Trace:
        self._ops_left = most_words
        self._schedule_faults()
        for actor in self._everyone:
            actor.script = actor.start()
            self._clock.at(0.0, self._begin, actor)
        while self._unfinished:
            if not self._clock.run_next():
                raise self._stuck("nothing can happen any more")
            if self._clock.now > most_seconds:
                raise self._stuck(f"{most_seconds} virtual seconds have passed")
        for actor in self._everyone:
            if actor.script is not None:
                actor.ended = Ended(moment=self._clock.now, result=_close(actor.script))
        return self._trace()

    def where(self) -> str:
        return f"at {self._clock.now} virtual seconds, when {self._last_resumed} spoke last"

    def _trace(self) -> Trace:
        paths = [(actor.peer, to, path) for actor in self._everyone for to, path in actor.paths.items()]
        return Trace(
            seconds=self._clock.now,
            ended={actor.peer: actor.ended for actor in self._everyone if actor.ended is not None},
            sent_bytes={(sender, to): path.sent_bytes for sender, to, path in paths if path.sent_bytes},
            received_bytes={(sender, to): path.received_bytes for sender, to, path in paths if path.received_bytes},
            messages=self._trace_writer.messages,
            resent=self._trace_writer.resent,
            lost=self._trace_writer.lost,
            duplicated=self._trace_writer.duplicated,
            events=tuple(self._trace_writer.events),
        )

    def _stuck(self, why: str) -> AssertionError:
        waits = [f"{actor.peer} waits {actor.wait}" for actor in self._everyone if actor.script is not None]
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
        self._membership.announce(actor)
        self._advance(actor)

    def _advance(self, actor: Actor) -> None:
        """Resume a script until it has to wait."""
        while actor.script is not None and actor.paused_until is None:
            resumption = actor.wait.resumption(actor, actor.script, self._clock.now)
            if resumption is None:
                return
            self._ops_left, self._last_resumed = self._ops_left - 1, actor.peer
            if self._ops_left < 0:
                raise self._stuck("too many words have been said")
            self._resume(actor, resumption)

    def _resume(self, actor: Actor, resumption: Resumption) -> None:
        resume, event = resumption
        try:
            op = resume(event)
        except StopIteration as stop:
            self._end(actor, Ended(moment=self._clock.now, result=stop.value))
        except GossamerError as error:
            self._end(actor, Ended(moment=self._clock.now, error=error))
        else:
            self._issue(actor, op)

    def _end(self, actor: Actor, ended: Ended) -> None:
        self._trace_writer.note(actor.peer, ended)
        actor.script, actor.ended = None, ended
        self._unfinished -= actor.peer not in self._servers
        if ended.error is None:
            self._membership.leave(actor)
        else:
            self._membership.check_all_paths(actor)

    # Ops.

    def _issue(self, actor: Actor, op: PeerOp) -> None:
        match op:
            case Push() | Pull():
                self._ask(actor, (op,), single=True)
            case AtOnce(ops):
                self._ask(actor, ops, single=False)
            case Await(until=until):
                actor.wait = Listening(until)
                if until is not None and until > self._clock.now:
                    self._clock.at(until, self._advance, actor)
            case Reply(token=token, answer=answer):
                actor.wait = READY
                self._delivery.reply(actor, token, answer)
            case _:
                raise TypeError(f"{actor.peer} said {op!r}, which is no word of peers that do not move in step")

    def _ask(self, actor: Actor, ops: Sequence[Ask], single: bool) -> None:
        pending = tuple(self._pending(actor, op) for op in ops)
        timeout_seconds = min((op.within_seconds for op in ops if op.within_seconds is not None), default=inf)
        actor.wait = Asking(pending, single, self._clock.now + timeout_seconds)
        if timeout_seconds < inf:
            self._clock.after(timeout_seconds, self._advance, actor)
        for each in pending:
            self._delivery.ask(each)

    def _pending(self, actor: Actor, op: Ask) -> PendingAsk:
        payload, receiver = payload_of(op), self._actor(receiver_of(op))
        checksum = payload_checksum(payload) if self._checks else NO_CHECKSUM
        return PendingAsk(op, actor, actor.incarnation, receiver, payload_bytes(payload), self._clock.now, checksum)

    def _actor(self, peer: Peer) -> Actor:
        if peer not in self._actors:
            raise ValueError(
                f"{peer} has no script, so no ask or fault can reach it. There are: "
                f"{', '.join(map(str, self._actors))}."
            )
        return self._actors[peer]

    # Faults.

    def _schedule_faults(self) -> None:
        for fault in self._net.faults:
            for moment, callback in fault.effects():
                self._clock.at(moment, self._apply_fault, callback)
            if isinstance(fault, Restart):
                self._actor(fault.peer).restarts += 1

    def _apply_fault(self, callback: Callable[[MessageTarget], None]) -> None:
        callback(self)
        self._delivery.retry()

    def kill(self, peer: Peer) -> None:
        actor = self._actor(peer)
        if actor.script is None:
            return
        self._trace_writer.note(peer, "is killed")
        _close(actor.script)
        for pending in actor.wait.pending:
            pending.settled = True
        actor.die(self._clock.now)
        self._unfinished -= peer not in self._servers and not actor.restarts
        self._membership.check_all_paths(actor)
        for pending in [
            pending for other in self._everyone for pending in other.wait.pending if pending.receiver is actor
        ]:
            self._delivery.ask_again(pending)

    def restart(self, peer: Peer) -> None:
        actor = self._actor(peer)
        actor.restarts -= 1
        if actor.ended is not None and actor.ended.killed:
            self._trace_writer.note(peer, "is started again")
            actor.script, actor.ended = actor.start(), None
            self._membership.introduce(actor)
            self._begin(actor)

    def pause(self, peer: Peer, until: float) -> None:
        actor = self._actor(peer)
        if actor.script is not None:
            self._trace_writer.note(peer, "stops until", until)
            actor.paused_until = max(until, actor.paused_until or until)
            self._membership.check_all_paths(actor)

    def resume(self, peer: Peer) -> None:
        actor = self._actor(peer)
        if actor.paused_until is not None and actor.paused_until <= self._clock.now:
            self._trace_writer.note(peer, "goes on")
            actor.paused_until = None
            self._membership.check_all_paths(actor)
            self._advance(actor)

    def cut(self, paths: Iterable[tuple[Peer, Peer]]) -> None:
        self._change_cuts(paths, 1, "is cut off from")

    def heal(self, paths: Iterable[tuple[Peer, Peer]]) -> None:
        self._change_cuts(paths, -1, "is heard again by")

    def _change_cuts(self, paths: Iterable[tuple[Peer, Peer]], cuts: int, what: str) -> None:
        for sender, receiver in paths:
            actor, other = self._actor(sender), self._actor(receiver)
            actor.paths[receiver].cuts += cuts
            self._trace_writer.note(sender, what, receiver)
            self._membership.check_path(actor, other)


def _close(script: PeerScript) -> Any:
    """Close a script where it waits; returns its result."""
    try:
        script.throw(GeneratorExit())
    except StopIteration as stop:
        return stop.value
    except GeneratorExit:
        return None
    raise RuntimeError(f"{script} went on speaking when it was closed: let GeneratorExit pass, or return")
