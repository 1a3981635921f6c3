"""Simulator: resumes peers' scripts in virtual time, delivers their messages and events, and applies faults."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from math import inf
from random import Random
from typing import Any

from gossamer.base.ops import payload_bytes
from gossamer.base.peer_ops import (
    SERVER,
    Answer,
    Arrived,
    Ask,
    AtOnce,
    Await,
    Peer,
    PeerEvent,
    PeerJoined,
    PeerLeft,
    PeerOp,
    PeerScript,
    Pull,
    Push,
    Reply,
)
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
    QueuedMessage,
    Resumption,
    payload_checksum,
    payload_of,
    receiver_of,
)
from gossamer.comm.simulation.faulty_network import MessageTarget, Restart, VirtualNetwork
from gossamer.comm.simulation.trace import Ended, Trace, TraceWriter
from gossamer.errors import GossamerError

# -- messages ----------------------------------------------------------------------------------------------------------


SURVIVES = 0.5  # probability that a message of a peer killed after sending it still arrives


class Delivery:
    """Delivers requests and answers between actors. wake(actor): resumes its script if possible.

    Like TCP, the network knows which messages it lost, so only those are resent, resend_seconds after they were sent.
    Nothing is sent to a peer that is down or behind a cut: such a request is stranded until a fault ends. A request
    arrives only while its sender is present at the receiver: as over one connection, after PeerJoined and before
    PeerLeft.
    """

    def __init__(
        self,
        net: VirtualNetwork,
        random: Random,
        clock: VirtualClock,
        trace_writer: TraceWriter,
        checks: bool,
        wake: Callable[[Actor], Any],
    ) -> None:
        self._net, self._random, self._clock, self._trace_writer = net, random, clock, trace_writer
        self._checks, self._wake = checks, wake
        self._tokens = count(1)
        self._delivered: dict[int, tuple[PendingAsk, Actor, int]] = {}
        self._stranded: list[PendingAsk] = []

    def ask(self, pending: PendingAsk) -> None:
        """Send a request, for the first time or again."""
        asker, receiver = pending.asker, pending.receiver
        if receiver.script is None or asker.paths[receiver.peer].cuts:
            self._stranded.append(pending)
            return
        pending.sent = self._clock.now
        self._send(
            asker,
            receiver,
            QueuedMessage(pending, None, pending.nbytes, asker.incarnation, receiver.incarnation, pending.checksum),
        )

    def reply(self, actor: Actor, token: int, answer: Answer) -> None:
        pending, *holder = self._delivered.pop(token, (None, actor, -1))
        if pending is None or holder != [actor, actor.incarnation]:
            raise ValueError(
                f"{actor.peer} replied to token {token}, which this incarnation has not received or has already used, "
                "so no peer waits for it. Reply once to every request."
            )
        if actor.paths[pending.asker.peer].cuts:
            self.ask_again(pending)
            return
        checksum, nbytes = (
            payload_checksum(answer.payload) if self._checks else NO_CHECKSUM,
            payload_bytes(answer.payload),
        )
        self._send(
            actor,
            pending.asker,
            QueuedMessage(pending, answer, nbytes, actor.incarnation, pending.incarnation, checksum),
        )

    def _send(self, sender: Actor, receiver: Actor, message: QueuedMessage) -> None:
        path = sender.paths[receiver.peer]
        message.departed_at = self._clock.now + path.link.sending_seconds(message.nbytes)
        path.sent_bytes += message.nbytes
        delivery_delays = path.link.delivery_delays(message.nbytes, self._net.resend_seconds, self._random)
        self._trace_writer.messages += 1
        self._trace_writer.duplicated += len(delivery_delays) > 1
        self._trace_writer.note(message, "leaves")
        if not delivery_delays:
            self._lose(message)
        for seconds in delivery_delays:
            self._clock.after(seconds, self._arrive, sender, receiver, message)

    def _arrive(self, sender: Actor, receiver: Actor, message: QueuedMessage) -> None:
        path = sender.paths[receiver.peer]
        if path.cuts or self._is_lost(sender, receiver, message):
            self._lose(message)
            return
        path.received_bytes += message.nbytes
        self._trace_writer.note(message, "arrives")
        if self._checks:
            message.check()
        if message.answer is None:
            self._deliver(message.pending, receiver)
        elif not message.pending.settled:
            message.pending.answer, message.pending.settled = message.answer, True
            self._wake(receiver)

    def _is_lost(self, sender: Actor, receiver: Actor, message: QueuedMessage) -> bool:
        """Whether it is lost because its receiver is down, or because its sender was killed or is not present."""
        if receiver.script is None or receiver.incarnation != message.receiver_incarnation:
            return True
        if message.answer is None and receiver.present.get(sender.peer) != message.sender_incarnation:
            return True
        if sender.incarnation == message.sender_incarnation:
            return False
        return sender.deaths[message.sender_incarnation] < message.departed_at or self._random.random() > SURVIVES

    def _deliver(self, pending: PendingAsk, receiver: Actor) -> None:
        token = next(self._tokens)
        self._delivered[token] = pending, receiver, receiver.incarnation
        receiver.inbox.append(partial(Arrived, token=token, sender=pending.asker.peer, op=pending.op))
        self._wake(receiver)

    def _lose(self, message: QueuedMessage) -> None:
        self._trace_writer.note(message, "is lost")
        self._trace_writer.lost += 1
        self.ask_again(message.pending)

    def ask_again(self, pending: PendingAsk) -> None:
        """Resend a lost request or answer resend_seconds after it was sent, or from now if that is past."""
        if not pending.settled and not pending.resend_due:
            pending.resend_due = True
            again, now = pending.sent + self._net.resend_seconds, self._clock.now
            self._clock.at(again if again > now else now + self._net.resend_seconds, self._ask_again, pending)

    def _ask_again(self, pending: PendingAsk) -> None:
        pending.resend_due = False
        if pending.settled:
            return
        if not pending.connected:
            self._stranded.append(pending)
            return
        self._trace_writer.resent += 1
        self.ask(pending)

    def retry(self) -> None:
        """Try stranded requests again after a fault began or ended."""
        stranded, self._stranded = self._stranded, []
        for pending in stranded:
            if pending.connected:
                self.ask_again(pending)
            elif not pending.settled:
                self._stranded.append(pending)


# -- joins and leaves --------------------------------------------------------------------------------------------------


class Membership:
    """Notifies every actor of joins and leaves. wake(actor): resumes its script if possible.

    PeerLeft is delivered dead_after_seconds after the silence began, or with a message's latency if a peer ends by
    itself. PeerJoined has a message's latency: at the start, after a PeerLeft, and after a restart.
    """

    def __init__(
        self, actors: Collection[Actor], dead_after_seconds: float, clock: VirtualClock, wake: Callable[[Actor], Any]
    ) -> None:
        self._actors, self._dead_after_seconds, self._clock, self._wake = actors, dead_after_seconds, clock, wake

    def announce(self, actor: Actor) -> None:
        """Notify all other actors that an incarnation begins."""
        for other in self._others(actor):
            other.silent.pop(actor.peer, None)
            if self._is_reachable(actor, other):
                self._clock.after(
                    actor.paths[other.peer].link.latency_seconds, self._join, actor, other, actor.incarnation
                )
            else:
                other.silent[actor.peer] = self._clock.now

    def introduce(self, actor: Actor) -> None:
        """Notify a restarted incarnation, which knows no peers, of each peer that is present."""
        actor.present.clear()
        actor.silent.clear()
        for other in self._others(actor):
            if self._is_reachable(other, actor):
                self._clock.after(
                    other.paths[actor.peer].link.latency_seconds, self._join, other, actor, other.incarnation
                )
            else:
                actor.silent[other.peer] = self._clock.now

    def _others(self, actor: Actor) -> list[Actor]:
        return [other for other in self._actors if other is not actor]

    def leave(self, actor: Actor) -> None:
        for other in self._others(actor):
            if not actor.paths[other.peer].cuts and actor.peer not in other.silent:
                other.silent[actor.peer] = self._clock.now
                self._clock.after(
                    actor.paths[other.peer].link.latency_seconds, self._leave, actor, other, self._clock.now
                )
        self.check_all_paths(actor)

    def check_all_paths(self, actor: Actor) -> None:
        """After a change of an actor, update whether each other actor can reach it."""
        for other in self._others(actor):
            self.check_path(actor, other)

    def check_path(self, actor: Actor, other: Actor) -> None:
        """After a change of `actor` or its path to `other`, update whether `other` can reach it."""
        is_reachable = self._is_reachable(actor, other)
        if is_reachable and other.silent.pop(actor.peer, None) is not None:
            self._clock.after(actor.paths[other.peer].link.latency_seconds, self._join, actor, other, actor.incarnation)
        elif not is_reachable and actor.peer not in other.silent:
            other.silent[actor.peer] = self._clock.now
            self._clock.after(self._dead_after_seconds, self._leave, actor, other, self._clock.now)

    def _is_reachable(self, actor: Actor, other: Actor) -> bool:
        return actor.script is not None and actor.paused_until is None and not actor.paths[other.peer].cuts

    def _join(self, actor: Actor, other: Actor, incarnation: int) -> None:
        if (
            actor.incarnation == incarnation
            and actor.peer not in other.silent
            and other.present.get(actor.peer) != incarnation
        ):
            other.present[actor.peer] = incarnation
            self._notify(other, partial(PeerJoined, peer=actor.peer))

    def _leave(self, actor: Actor, other: Actor, since: float) -> None:
        if other.silent.get(actor.peer) == since and other.present.pop(actor.peer, None) is not None:
            self._notify(other, partial(PeerLeft, peer=actor.peer))

    def _notify(self, actor: Actor, event: Callable[..., Any]) -> None:
        if actor.script is not None:
            actor.inbox.append(event)
            self._wake(actor)


# -- the simulation ----------------------------------------------------------------------------------------------------

Scripts = Mapping[Peer, Callable[[], PeerScript]]


def compute(seconds: float) -> Generator[PeerOp, Any, float]:
    """Script that computes for `seconds`; returns the time afterwards. Events in between are dropped.

    Awaiting a past time reads the clock without waiting.
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
    """Start every peer's script at time 0, and run until all except the servers have ended.

    Args:
        scripts: Called to create a peer's script at the start, and again when a fault restarts the peer.
        net: The network and its faults.
        seed: Seed of all draws.
        servers: Peers that only answer (None: those of that kind). Their scripts are closed at the end; a script that
            catches GeneratorExit may return a result. A kill also closes a script, but ignores its result.
        keep: Whether to record events.
        checks: Whether to raise AssertionError if a payload is modified in transit.
        most_words: Maximum number of ops.
        most_seconds: Maximum virtual time in seconds.

    Raises:
        AssertionError: A deadlock, or a limit is exceeded; the message lists the wait of each script.

    A GossamerError ends its script and is stored in the trace. Any other error ends the simulation, with a note that
    has the seed.
    """
    if servers is None:
        servers = [peer for peer in scripts if peer.kind == SERVER]
    simulation = _Simulation(scripts, net, seed, servers, keep, checks)
    try:
        return simulation.run(most_words, most_seconds)
    except Exception as error:
        error.add_note(f"It was in simulate_peers(..., seed={seed}), {simulation.where()}, over {net}.")
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
        random = Random(address("converse", seed))  # this text determines all draws
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
                raise self._stuck("no event is left")
            if self._clock.now > most_seconds:
                raise self._stuck(f"{most_seconds} virtual seconds have passed")
        for actor in self._everyone:
            if actor.script is not None:
                actor.ended = Ended(moment=self._clock.now, result=_close(actor.script))
        return self._trace()

    def where(self) -> str:
        return f"at {self._clock.now} virtual seconds, after an op of {self._last_resumed}"

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
            "Pass peers that only answer as simulate_peers(..., servers=...)."
        )
        errors = (actor.ended.error for actor in self._everyone if actor.ended is not None)
        stuck.__cause__ = next((error for error in errors if error is not None), None)
        return stuck

    # -- scripts -------------------------------------------------------------------------------------------------------

    def _begin(self, actor: Actor) -> None:
        self._membership.announce(actor)
        self._advance(actor)

    def _advance(self, actor: Actor) -> None:
        """Resume a script until it must wait."""
        while actor.script is not None and actor.paused_until is None:
            resumption = actor.wait.resumption(actor, actor.script, self._clock.now)
            if resumption is None:
                return
            self._ops_left, self._last_resumed = self._ops_left - 1, actor.peer
            if self._ops_left < 0:
                raise self._stuck("the maximum number of ops is exceeded")
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

    # -- ops -----------------------------------------------------------------------------------------------------------

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
                raise TypeError(f"{actor.peer} issued {op!r}, which is not an op of asynchronous peers")

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
                f"{peer} has no script, so it cannot receive a request or fault. Peers with scripts: "
                f"{', '.join(map(str, self._actors))}."
            )
        return self._actors[peer]

    # -- faults --------------------------------------------------------------------------------------------------------

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
            self._trace_writer.note(peer, "is restarted")
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
            self._trace_writer.note(peer, "continues")
            actor.paused_until = None
            self._membership.check_all_paths(actor)
            self._advance(actor)

    def cut(self, paths: Iterable[tuple[Peer, Peer]]) -> None:
        self._change_cuts(paths, 1, "is cut off from")

    def heal(self, paths: Iterable[tuple[Peer, Peer]]) -> None:
        self._change_cuts(paths, -1, "is connected again to")

    def _change_cuts(self, paths: Iterable[tuple[Peer, Peer]], cuts: int, what: str) -> None:
        for sender, receiver in paths:
            actor, other = self._actor(sender), self._actor(receiver)
            actor.paths[receiver].cuts += cuts
            self._trace_writer.note(sender, what, receiver)
            self._membership.check_path(actor, other)


def _close(script: PeerScript) -> Any:
    """Close a waiting script, and return its result."""
    try:
        script.throw(GeneratorExit())
    except StopIteration as stop:
        return stop.value
    except GeneratorExit:
        return None
    raise RuntimeError(f"{script} yielded after it was closed: let GeneratorExit pass, or return")
