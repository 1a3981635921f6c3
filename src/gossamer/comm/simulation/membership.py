"""Simulated membership: a peer joins when it can be heard, and has left when it was silent for too long.

Heartbeats are not simulated one by one: a peer that runs and whose path is open is heard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from gossamer.base.peer_ops import PeerJoined, PeerLeft
from gossamer.base.virtual_clock import VirtualClock
from gossamer.comm.simulation.actors import Actor


class Membership:
    """Tells every actor of joins and leaves. wake(actor): resume its script, if it can.

    PeerLeft comes dead_after_seconds after the silence began or, where a peer ends by itself, as fast as a message.
    PeerJoined comes as fast as a message: at the start, after a PeerLeft, and after a restart.
    """

    def __init__(
        self, actors: Collection[Actor], dead_after_seconds: float, clock: VirtualClock, wake: Callable[[Actor], Any]
    ) -> None:
        self._actors, self._dead_after_seconds, self._clock, self._wake = actors, dead_after_seconds, clock, wake

    def announce(self, actor: Actor) -> None:
        """An incarnation begins: all others hear of it."""
        for other in self._others(actor):
            other.silent.pop(actor.peer, None)
            if self._is_heard(actor, other):
                self._clock.after(
                    actor.paths[other.peer].link.latency_seconds, self._join, actor, other, actor.incarnation
                )
            else:
                other.silent[actor.peer] = self._clock.now

    def introduce(self, actor: Actor) -> None:
        """An incarnation begins among others that are there: it knows none of them, and hears of each."""
        actor.present.clear()
        actor.silent.clear()
        for other in self._others(actor):
            if self._is_heard(other, actor):
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
        """After a change of an actor: let the others notice where it is heard no more, or again."""
        for other in self._others(actor):
            self.check_path(actor, other)

    def check_path(self, actor: Actor, other: Actor) -> None:
        """After a change of `actor` or its path to `other`: let `other` notice whether it is heard."""
        is_heard = self._is_heard(actor, other)
        if is_heard and other.silent.pop(actor.peer, None) is not None:
            self._clock.after(actor.paths[other.peer].link.latency_seconds, self._join, actor, other, actor.incarnation)
        elif not is_heard and actor.peer not in other.silent:
            other.silent[actor.peer] = self._clock.now
            self._clock.after(self._dead_after_seconds, self._leave, actor, other, self._clock.now)

    def _is_heard(self, actor: Actor, other: Actor) -> bool:
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
