"""Who hears whom: peers join when they can be heard, and have left when they were silent for too long.

Heartbeats are not sent one by one: a peer that runs and whose way is open is heard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from gossamer.core.peer_ops import PeerJoined, PeerLeft
from gossamer.simulation.actors import Actor
from gossamer.simulation.clock import VirtualClock


class Membership:
    """Tells every actor who joins and who leaves. wake(actor): let its script go on, if it can.

    Left comes dead_after_seconds after the silence began, or, from who ends by itself, as fast as a message. Joined
    comes as fast as a message, at the start, after a Left, and from who was started again.
    """

    def __init__(
        self, actors: Collection[Actor], dead_after_seconds: float, clock: VirtualClock, wake: Callable[[Actor], Any]
    ) -> None:
        self._actors, self._dead_after_seconds, self._clock, self._wake = actors, dead_after_seconds, clock, wake

    def announce(self, actor: Actor) -> None:
        """A life begins: everyone hears of it."""
        for other in self._others(actor):
            other.silent.pop(actor.peer, None)
            if self._audible(actor, other):
                self._clock.later(actor.ways[other.peer].link.latency_seconds, self._join, actor, other, actor.life)
            else:
                other.silent[actor.peer] = self._clock.now

    def learn(self, actor: Actor) -> None:
        """A life begins among others that are there: it knows nobody, and hears of them."""
        actor.present.clear()
        actor.silent.clear()
        for other in self._others(actor):
            if self._audible(other, actor):
                self._clock.later(other.ways[actor.peer].link.latency_seconds, self._join, other, actor, other.life)
            else:
                actor.silent[other.peer] = self._clock.now

    def _others(self, actor: Actor) -> list[Actor]:
        return [other for other in self._actors if other is not actor]

    def say_goodbye(self, actor: Actor) -> None:
        for other in self._others(actor):
            if not actor.ways[other.peer].cuts and actor.peer not in other.silent:
                other.silent[actor.peer] = self._clock.now
                self._clock.later(
                    actor.ways[other.peer].link.latency_seconds, self._leave, actor, other, self._clock.now
                )
        self.review_all(actor)

    def review_all(self, actor: Actor) -> None:
        """Something happened to an actor: is it heard by the others as before?"""
        for other in self._others(actor):
            self.review(actor, other)

    def review(self, actor: Actor, other: Actor) -> None:
        """Something happened to `actor` or its way to `other`: is it heard there as before?"""
        heard = self._audible(actor, other)
        if heard and other.silent.pop(actor.peer, None) is not None:
            self._clock.later(actor.ways[other.peer].link.latency_seconds, self._join, actor, other, actor.life)
        elif not heard and actor.peer not in other.silent:
            other.silent[actor.peer] = self._clock.now
            self._clock.later(self._dead_after_seconds, self._leave, actor, other, self._clock.now)

    def _audible(self, actor: Actor, other: Actor) -> bool:
        return actor.script is not None and actor.paused_until is None and not actor.ways[other.peer].cuts

    def _join(self, actor: Actor, other: Actor, life: int) -> None:
        if actor.life == life and actor.peer not in other.silent and other.present.get(actor.peer) != life:
            other.present[actor.peer] = life
            self._tell(other, partial(PeerJoined, peer=actor.peer))

    def _leave(self, actor: Actor, other: Actor, since: float) -> None:
        if other.silent.get(actor.peer) == since and other.present.pop(actor.peer, None) is not None:
            self._tell(other, partial(PeerLeft, peer=actor.peer))

    def _tell(self, actor: Actor, heard: Callable[..., Any]) -> None:
        if actor.script is not None:
            actor.inbox.append(heard)
            self._wake(actor)
