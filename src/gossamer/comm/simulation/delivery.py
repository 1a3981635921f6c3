"""Delivery: messages between actors are lost, resent, duplicated and answered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random
from typing import Any

from gossamer.base.ops import payload_bytes
from gossamer.base.peer_ops import Answer, Arrived
from gossamer.base.virtual_clock import VirtualClock
from gossamer.comm.simulation.actors import NO_CHECKSUM, Actor, PendingAsk, QueuedMessage, payload_checksum
from gossamer.comm.simulation.faulty_network import VirtualNetwork
from gossamer.comm.simulation.trace import TraceWriter

SURVIVES = 0.5  # probability that a message of a peer killed after sending it still arrives


class Delivery:
    """Carries asks and answers between actors. wake(actor): resume its script, if it can.

    The network knows what it lost, as TCP does, so only that is resent, resend_seconds after it was sent. Nothing is
    sent to a peer that is down or behind a cut: such an ask is stranded until a fault ends.
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
        """Send an ask, for the first time or again."""
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
                f"{actor.peer} replied to token {token}, which it did not hear in this incarnation or has used before, "
                "so no peer waits for it. Reply once to every ask that arrived."
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
        """Whether it is lost with its receiver, or with a sender that had not finished sending it."""
        if receiver.script is None or receiver.incarnation != message.receiver_incarnation:
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
        """The ask or its answer was lost: resend it resend_seconds after it was sent, or after now if that is past."""
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
        """A fault began or ended: stranded asks may have an open path now."""
        stranded, self._stranded = self._stranded, []
        for pending in stranded:
            if pending.connected:
                self.ask_again(pending)
            elif not pending.settled:
                self._stranded.append(pending)
