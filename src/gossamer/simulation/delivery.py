"""What is said travels: it gets lost, is sent again, arrives twice, and is answered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random
from typing import Any

from gossamer.core.ops import payload_bytes
from gossamer.core.peer_ops import Answer, Arrived
from gossamer.simulation.actors import UNSEALED, Actor, PendingAsk, QueuedMessage, seal
from gossamer.simulation.clock import VirtualClock
from gossamer.simulation.faulty_network import VirtualNetwork
from gossamer.simulation.trace import Diary

SURVIVES = 0.5  # how likely what a killed peer had sent still arrives


class Delivery:
    """Carries words and answers between actors. wake(actor): let its script go on, if it can.

    The network knows what it lost, as TCP does, so only that is sent again, resend_seconds after it was sent. Nothing
    is sent to who is down or behind a cut: such a word is stranded until a fault ends.
    """

    def __init__(
        self,
        net: VirtualNetwork,
        random: Random,
        clock: VirtualClock,
        diary: Diary,
        checks: bool,
        wake: Callable[[Actor], Any],
    ) -> None:
        self._net, self._random, self._clock, self._diary = net, random, clock, diary
        self._checks, self._wake = checks, wake
        self._tokens = count(1)
        self._held: dict[int, tuple[PendingAsk, Actor, int]] = {}
        self._stranded: list[PendingAsk] = []

    def ask(self, asked: PendingAsk) -> None:
        """Send a word, for the first time or again."""
        asker, receiver = asked.asker, asked.receiver
        if receiver.script is None or asker.ways[receiver.peer].cuts:
            self._stranded.append(asked)
            return
        asked.sent = self._clock.now
        self._send(asker, receiver, QueuedMessage(asked, None, asked.nbytes, asker.life, receiver.life, asked.seal))

    def reply(self, actor: Actor, token: int, answer: Answer) -> None:
        asked, *holder = self._held.pop(token, (None, actor, -1))
        if asked is None or holder != [actor, actor.life]:
            raise ValueError(
                f"{actor.peer} replied to token {token}, which it did not hear in this life or has used before, so "
                "nobody waits for it. Reply once to every word that arrived."
            )
        if actor.ways[asked.asker.peer].cuts:
            self.ask_again(asked)
            return
        sealed, nbytes = seal(answer.payload) if self._checks else UNSEALED, payload_bytes(answer.payload)
        self._send(actor, asked.asker, QueuedMessage(asked, answer, nbytes, actor.life, asked.life, sealed))

    def _send(self, sender: Actor, receiver: Actor, message: QueuedMessage) -> None:
        way = sender.ways[receiver.peer]
        message.left = self._clock.now + way.link.sending_seconds(message.nbytes)
        way.sent_bytes += message.nbytes
        travels = way.link.travels(message.nbytes, self._net.resend_seconds, self._random)
        self._diary.messages += 1
        self._diary.duplicated += len(travels) > 1
        self._diary.note(message, "leaves")
        if not travels:
            self._lose(message)
        for seconds in travels:
            self._clock.later(seconds, self._arrive, sender, receiver, message)

    def _arrive(self, sender: Actor, receiver: Actor, message: QueuedMessage) -> None:
        way = sender.ways[receiver.peer]
        if way.cuts or self._gone(sender, receiver, message):
            self._lose(message)
            return
        way.received_bytes += message.nbytes
        self._diary.note(message, "arrives")
        if self._checks:
            message.check()
        if message.answer is None:
            self._deliver(message.asked, receiver)
        elif not message.asked.over:
            message.asked.answer, message.asked.over = message.answer, True
            self._wake(receiver)

    def _gone(self, sender: Actor, receiver: Actor, message: QueuedMessage) -> bool:
        """Lost with who should hear it, or with who had not finished sending it."""
        if receiver.script is None or receiver.life != message.receiver_life:
            return True
        if sender.life == message.sender_life:
            return False
        return sender.deaths[message.sender_life] < message.left or self._random.random() > SURVIVES

    def _deliver(self, asked: PendingAsk, receiver: Actor) -> None:
        token = next(self._tokens)
        self._held[token] = asked, receiver, receiver.life
        receiver.inbox.append(partial(Arrived, token=token, sender=asked.asker.peer, op=asked.op))
        self._wake(receiver)

    def _lose(self, message: QueuedMessage) -> None:
        self._diary.note(message, "is lost")
        self._diary.lost += 1
        self.ask_again(message.asked)

    def ask_again(self, asked: PendingAsk) -> None:
        """The word or its answer was lost: resend_seconds after it was sent, or from now where that has passed."""
        if not asked.over and not asked.due:
            asked.due = True
            again, now = asked.sent + self._net.resend_seconds, self._clock.now
            self._clock.at(again if again > now else now + self._net.resend_seconds, self._ask_again, asked)

    def _ask_again(self, asked: PendingAsk) -> None:
        asked.due = False
        if asked.over:
            return
        if not asked.connected:
            self._stranded.append(asked)
            return
        self._diary.resent += 1
        self.ask(asked)

    def retry(self) -> None:
        """A fault began or ended: what is stranded may have a way now."""
        stranded, self._stranded = self._stranded, []
        for asked in stranded:
            if asked.connected:
                self.ask_again(asked)
            elif not asked.over:
                self._stranded.append(asked)
